"""Text from a model that does not fit: its weights pass through memory once for each token.

Enter at `generate`, which transformers' own loop runs in, on a `bare_module` whose weights a
`WeightStream` brings to each module when it is called. `PromptCodec` is the way from texts to
tokens and back. May import `models`, `capture`, `chat`, `config` and `store`; not `run` or `verbs`.
"""

from __future__ import annotations

from swaptrain.generate.bare_module import bare_module
from swaptrain.generate.generation import Generated, Sampling, generate
from swaptrain.generate.prompts import Prompt, PromptCodec, read_prompts
from swaptrain.generate.weight_stream import WeightStream

__all__ = ["Generated", "Prompt", "PromptCodec", "Sampling", "WeightStream", "bare_module"]
__all__ += ["generate", "read_prompts"]
