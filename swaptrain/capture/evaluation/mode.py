"""Puts a module into evaluation mode for a while, and takes it back as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from swaptrain.errors import CaptureError

__all__ = ["eager_fast_paths", "evaluating"]


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Call `module.eval()`, and afterwards give every submodule its mode and attributes back.

    The mode of each submodule is kept by itself, since a model may hold some of them in another
    one. What a forward assigns to attributes and buffers in evaluation mode is taken back.
    """
    submodules = list(module.modules())
    before = [(dict(vars(each)), dict(each._buffers)) for each in submodules]
    module.eval()
    try:
        yield
    finally:
        for each, (attributes, buffers) in zip(submodules, before, strict=True):
            for name in vars(each).keys() - attributes.keys():
                delattr(each, name)
            vars(each).update(attributes)
            each._buffers.clear()
            each._buffers.update(buffers)


@contextlib.contextmanager
def eager_fast_paths() -> Iterator[None]:
    """Let torch's attention layers take the fused operations that they take in evaluation mode.

    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` avoid them while a graph is traced and
    for tensors of other classes, such as fakes. Their last bits differ from the plain operations'.
    Nested tensors, which `nn.TransformerEncoder` makes of a padding mask, are refused.
    """
    replacements: list[tuple[Any, str, Any]] = [
        (torch.nn.modules.activation, "_is_make_fx_tracing", _no),
        (torch.overrides, "has_torch_function", _no),
        (torch, "_nested_tensor_from_mask_left_aligned", _refuse_nested),
        (torch, "_nested_tensor_from_mask", _refuse_nested),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, function in replacements:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, function)
        yield


def _no(*_: object) -> bool:
    return False


def _refuse_nested(*_: object, **__: object) -> bool:
    raise CaptureError(
        "nn.TransformerEncoder turns a batch with src_key_padding_mask into a nested tensor in "
        "evaluation mode, which no graph can hold: build it with enable_nested_tensor=False"
    )
