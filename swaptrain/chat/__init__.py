"""Conversations and other rows become token ids, of which some are trained; without torch.

Enter at `encode_files`, which gives rows in order from several processes, and `pack`, which lays
them into sequences. A chat template is somebody else's program: it runs in those processes alone,
in transformers' sandbox, within limits. May import `errors`, `units`, `strict_json` and
`processes`.
"""

from __future__ import annotations

from swaptrain.chat.encode import EncodeSettings
from swaptrain.chat.packing import PAD, Packer, coded, decoded
from swaptrain.chat.pool import encode_files
from swaptrain.chat.report import Report
from swaptrain.chat.tokens import ChatTokenizer

__all__ = ["PAD", "ChatTokenizer", "EncodeSettings", "Packer", "Report", "coded", "decoded"]
__all__ += ["encode_files"]
