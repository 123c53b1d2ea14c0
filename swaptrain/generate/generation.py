"""Runs transformers' `generate` on weights that are streamed, and says what it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, RunError
from swaptrain.generate.prompts import Prompt, PromptCodec
from swaptrain.generate.weight_stream import WeightStream
from swaptrain.models.factory import described
from swaptrain.strict_json import read_json
from swaptrain.units import MIB

__all__ = ["Generated", "Sampling", "check_generates", "generate", "generation_settings"]
__all__ += ["working_bytes"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest one, or drawn where a temperature is given."""

    max_new_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return transformers' words for it."""
        found: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": 1}
        asked = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {key: value for key, value in asked.items() if value is not None}
        if not given:
            return found | {"do_sample": False} | asked
        return found | {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0} | given


@dataclass(frozen=True)
class Generated:
    """What was written, and what it took."""

    texts: list[str]
    tokens: list[Tensor]
    """Of each prompt the new ids, end token included, padding not."""
    seconds: float
    passes: int
    """How often the weights passed: once for each token of the longest text."""


def check_generates(module: nn.Module) -> None:
    """Raise ConfigError for a module that no text comes out of."""
    can_generate: Any = getattr(module, "can_generate", None)
    if can_generate is None or not can_generate():
        name = type(module).__name__
        raise ConfigError(
            f"{name} writes no text: generate needs a model of transformers that does, such as a "
            "...ForCausalLM"
        )


def working_bytes(module: Any, prompts: int, length: int) -> int:
    """Return about what keys, values and activations of so many sequences take.

    Keys and values are 2 x layers x heads of them x size of a head numbers a token; of activations
    the widest layer's count, and the scores of the last token.
    """
    config = module.config.get_text_config(decoder=True)
    hidden = int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 1024))
    layers = int(getattr(config, "num_hidden_layers", 0) or 1)
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    kept = int(getattr(config, "num_key_value_heads", 0) or heads)
    size = int(getattr(config, "head_dim", 0) or hidden // heads)
    wide = int(getattr(config, "intermediate_size", 0) or 4 * hidden)
    item = int(next(module.parameters()).element_size())
    sides: int = 2 if module.config.is_encoder_decoder else 1
    cache = 2 * layers * kept * size * item * sides
    activations = 4 * (6 * hidden + 3 * wide)
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    return int(prompts * (length * (cache + activations) + 12 * vocabulary))


def generate(
    module: Any,
    stream: WeightStream,
    codec: PromptCodec,
    prompts: list[Prompt],
    sampling: Sampling,
    *,
    device: torch.device,
    write: Callable[[str], None] | None = None,
) -> Generated:
    """Return what transformers' `generate` makes of the prompts, all in one batch.

    `write` gets the text of a single prompt as it comes. Raises ConfigError for what transformers
    refuses, RunError where the scores are not finite.
    """
    ids, mask = codec.encode(prompts, left=not module.config.is_encoder_decoder)
    torch.manual_seed(sampling.seed)
    guard = _Finite()
    streamer = None
    if write is not None and len(prompts) == 1:
        streamer = _streamer(codec, write, skip_prompt=not module.config.is_encoder_decoder)
    begun = time.perf_counter()
    try:
        found: Any = module.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            pad_token_id=codec.pad_id,
            logits_processor=[guard],
            streamer=streamer,
            use_cache=True,
            **sampling.arguments(),
        )
    except (ConfigError, RunError):
        raise
    except (ValueError, NotImplementedError) as error:  # what it says of a model or an option
        raise ConfigError(f"transformers does not generate: {described(error)}") from error
    seconds = time.perf_counter() - begun
    skipped = 1 if module.config.is_encoder_decoder else ids.shape[1]
    ends = module.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    new = [_until_end(row[skipped:].cpu(), ends) for row in found]
    return Generated([codec.decode(row) for row in new], new, seconds, guard.calls)


class _Finite:
    """Looks at the scores of each token, as one of transformers' logits processors."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if scores.isnan().any():
            raise RunError(
                "the scores of a token are NaN, and so are weights of the run: look at its losses, "
                "or take the weights of an earlier step with --step N"
            )
        return scores


def _streamer(codec: PromptCodec, write: Callable[[str], None], *, skip_prompt: bool) -> Any:
    from transformers import TextStreamer

    class Written(TextStreamer):  # type: ignore[misc]  # of an untyped library
        """Hands on text at the ends of words."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text + ("\n" if stream_end else ""))

    return Written(codec, skip_prompt=skip_prompt)


def _until_end(row: Tensor, ends: list[int | None]) -> Tensor:
    for place, token in enumerate(row.tolist()):
        if token in ends:
            return row[: place + 1]
    return row


def generation_settings(config: Config, codec: PromptCodec, module: Any) -> None:
    """Let a module generate as its directory says: end tokens, and that it keeps keys and values.

    A config that draws by default does not: the command line says how a token is chosen.
    """
    from transformers import GenerationConfig

    source = config.model.hf
    file = None if isinstance(source, dict) else Path(str(source)) / "generation_config.json"
    if file is not None and file.is_file():
        try:
            fields = read_json(file, MIB)
            module.generation_config = GenerationConfig(**fields)
        except Exception as error:  # whatever is in it
            raise ConfigError(f"{file}: {described(error)}") from error
    settings = module.generation_config
    settings.use_cache, settings.max_length = True, None
    if settings.eos_token_id is None:
        settings.eos_token_id = codec.end_id
    for part in (module.config, module.config.get_text_config(decoder=True)):
        part.use_cache = True
