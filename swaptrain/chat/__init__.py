"""Conversations and other rows become token ids, of which some are trained; without torch.

Enter at `encode_files`, which gives rows in order from several processes, and `Packer`, which
lays them into sequences. A chat template is somebody else's program: it runs in transformers'
sandbox, in those processes and in that of `render_prompts` alone, within limits. May import
`errors`, `units`, `strict_json` and `processes`.
"""

from __future__ import annotations

from swaptrain.chat.encode import EncodeSettings
from swaptrain.chat.packing import PAD, Packer, coded, decoded
from swaptrain.chat.pool import encode_files
from swaptrain.chat.refusal import RowError
from swaptrain.chat.render import render_prompts
from swaptrain.chat.report import Report
from swaptrain.chat.template import ChatTemplate, read_template
from swaptrain.chat.tokens import ChatTokenizer, open_backend, special_tokens

__all__ = ["PAD", "ChatTemplate", "ChatTokenizer", "EncodeSettings", "Packer", "Report"]
__all__ += [
    "RowError",
    "coded",
    "decoded",
    "encode_files",
    "open_backend",
    "read_template",
    "render_prompts",
    "special_tokens",
]
