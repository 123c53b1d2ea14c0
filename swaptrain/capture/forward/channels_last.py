"""Images whose channels come last in memory, in a model and in what its forward is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["use_channels_last"]


class _ChannelsLast:
    """A forward whose images are laid out with their channels last."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = {name: _laid_out(value) for name, value in kwargs.items()}
        return self._forward(*map(_laid_out, args), **named)


def use_channels_last(module: nn.Module) -> nn.Module:
    """Lay out a module's tensors of four dimensions, and the images of each forward; return it.

    As `module.to(memory_format=torch.channels_last)` and the same of a batch in PyTorch's tutorial
    (Channels Last Memory Format). The bits are those of plain PyTorch that does so.
    """
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.forward = _ChannelsLast(module.forward)
    return module


def _laid_out(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point():
        return value.contiguous(memory_format=torch.channels_last)
    return value
