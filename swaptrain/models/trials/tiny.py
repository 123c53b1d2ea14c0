"""A small model of the same class: what can be asked of it in a moment, and in little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import nn

__all__ = ["randomise", "tiny_model"]

_MOST_PARAMETERS = 16_000_000
_FEW_LAYERS = 8
_VOCABULARY = 128
_WIDTHS = {
    "intermediate_size": 64, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "d_ff": 64, "n_inner": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 64, "n_groups": 1,
}  # fmt: skip
"""Widths that nothing else follows from."""
_DEPTHS = (
    *("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"),
    "num_decoder_layers",
)
_HEADS = (
    *("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
)


def tiny_model(cls: Any, config: Any) -> nn.Module | None:
    """Return a model of the class in float32 with real weights, in evaluation mode.

    It has the config's own flags, and as many of its sizes as a few million parameters allow. None
    where none can be made: a class may have rules of its own for its sizes.
    """
    for small in _smaller(config):
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in cls._from_config(deepcopy(small)).parameters())
            if count > _MOST_PARAMETERS:
                continue
            model: nn.Module = cls._from_config(small, dtype=torch.float32)
        except Exception:  # a class may refuse these sizes in any way; the next may do
            continue
        return model.eval()
    return None


def randomise(model: nn.Module, scale: float) -> None:
    """Move every weight away from zero: what begins as nothing would hide what it will see."""
    if not scale:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            spread = fan_in**-0.5 if parameter.ndim > 1 else 0.2
            parameter.add_(torch.randn_like(parameter) * spread * scale)


def _smaller(config: Any) -> Iterator[Any]:
    """Yield the config itself where it has few layers, then smaller ones."""
    if max(_size(config, name) or 0 for name in _DEPTHS) <= _FEW_LAYERS:
        yield deepcopy(config)
    fewer = deepcopy(config)
    for part in _parts(fewer):
        _cut_depth(part)
    yield deepcopy(fewer)
    for part in _parts(fewer):
        _cut_vocabulary(part)
    yield deepcopy(fewer)
    for part in _parts(fewer):
        _cut_width(part)
    yield fewer


def _parts(config: Any) -> Iterator[Any]:
    """Yield a config and the configs within it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, type(config).__mro__[-2]) or hasattr(value, "model_type"):
            yield from _parts(value)


def _size(config: Any, name: str) -> int | None:
    """Return a size that a config has; some raise an error of their own for one that it has not."""
    try:
        found = getattr(config, name, None)
    except Exception:
        return None
    return found if isinstance(found, int) else None


def _set(config: Any, name: str, value: Any) -> None:
    """Set a field where the config lets it be set; what it refuses stays as it is."""
    with suppress(Exception):
        setattr(config, name, value)


def _cut_depth(config: Any) -> None:
    """Keep two layers, or one of each kind where layers are of several."""
    kinds = getattr(config, "layer_types", None)
    keep = [0, 1]
    if isinstance(kinds, list) and kinds:
        keep = sorted({kinds.index(kind) for kind in kinds} | {0, 1} & {*range(len(kinds))})
    for name in _DEPTHS:
        depth = _size(config, name)
        if depth is not None and depth > len(keep):
            for key, value in list(vars(config).items()):
                if isinstance(value, list) and len(value) == depth:
                    _set(config, key, [value[i] for i in keep])
            _set(config, name, len(keep))


def _cut_vocabulary(config: Any) -> None:
    """Let the vocabulary be small, and the tokens that mean something be in it."""
    words = _size(config, "vocab_size")
    if words is not None:
        _set(config, "vocab_size", min(words, _VOCABULARY))
    for key, value in list(vars(config).items()):
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            _set(config, key, value % (_VOCABULARY // 2))


def _cut_width(config: Any) -> None:
    """Let there be two heads of the config's own size, and small layers between them."""
    hidden = _size(config, "hidden_size")
    heads = next((n for name in _HEADS if (n := _size(config, name)) is not None), None)
    for name, width in _WIDTHS.items():
        found = _size(config, name)
        if found is not None:
            _set(config, name, min(width, found))
    if hidden is None or not heads or heads <= 2 or hidden % heads:
        return
    small = 2 * (hidden // heads)
    for name in _HEADS:
        if _size(config, name) is not None:
            _set(config, name, 2)
    groups = _size(config, "num_key_value_heads")
    if groups is not None:
        _set(config, "num_key_value_heads", 2 if groups == heads else 1)
    for key, value in list(vars(config).items()):
        if value == hidden and isinstance(value, int):  # what is as wide as the hidden states
            _set(config, key, small)
    _set(config, "hidden_size", small)
