"""Answers Python code of a model that asks for values of its batch, and records what it asked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

import swaptrain
from swaptrain.capture.checks.batch_values import BatchValues
from swaptrain.capture.checks.operation import KNOWN

__all__ = ["KnownInputs", "answered_questions"]

_NOT_THE_MODELS = tuple(f"{Path(file).parent}/" for file in (torch.__file__, swaptrain.__file__))
_TRUTH = torch.Tensor.__bool__
_QUESTIONS: tuple[Any, ...] = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__complex__,
    _TRUTH,
)


class KnownInputs:
    """The real tensors behind the fake ones that an export calls a model with."""

    def __init__(self, values: BatchValues, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self._values, self._batch = values, dict(batch)
        self._buffers = {
            name: buffer
            for name, buffer in model.named_buffers()
            if not isinstance(buffer, FakeTensor)
        }

    def enter(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """Say what the forward that begins is called with, and which buffers it has."""
        for key, fake in batch.items():
            self._values.know(fake, self._batch[key])
        for name, fake in model.named_buffers():
            if isinstance(fake, FakeTensor) and name in self._buffers:
                self._values.know(fake, self._buffers[name])


_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""Take a list of tensors of one element each for its numbers."""


@contextlib.contextmanager
def answered_questions(values: BatchValues) -> Iterator[None]:
    """Answer with real values where they are known, each time leaving a node that says so."""
    original = FakeTensor.tolist

    def tolist(self: FakeTensor) -> Any:
        answer = _answer(values, torch.Tensor.tolist, (self,), {})
        return original(self) if answer is None else answer[0]

    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    try:
        with values, _Questions(values):
            yield
    finally:
        FakeTensor.tolist = original  # type: ignore[method-assign]


class _Questions(TorchFunctionMode):
    """Sees the methods of tensors that hand values to Python."""

    def __init__(self, values: BatchValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a question whose answer is known; leave everything else alone."""
        kwargs = dict(kwargs or {})
        if func in _MADE_OF_NUMBERS and args and isinstance(args[0], list | tuple):
            numbers = pytree.tree_map_only(FakeTensor, self._number, args[0])
            return func(numbers, *args[1:], **kwargs)
        if func in _QUESTIONS and args and isinstance(args[0], FakeTensor):
            answer = _answer(self._values, func, args, kwargs)
            if answer is not None:
                return answer[0]
        return func(*args, **kwargs)

    def _number(self, tensor: FakeTensor) -> Any:
        answer = _answer(self._values, torch.Tensor.item, (tensor,), {})
        return tensor if answer is None else answer[0]


def _answer(
    values: BatchValues, func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any] | None:
    """Return the answer in a tuple; None where it is not known."""
    tensor = args[0]
    real = values.real(tensor)
    rest = [values.real(other) if isinstance(other, Tensor) else other for other in args[1:]]
    if real is None or any(other is None for other in rest):
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        found = func(real, *rest, **kwargs)
    if get_proxy_mode() is not None:
        # Of a condition only its truth matters.
        KNOWN(tensor != 0 if func is _TRUTH and tensor.dtype != torch.bool else tensor, _asker())
    return (found,)


def _asker() -> str:
    """Return the innermost line of the model's own code."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_NOT_THE_MODELS, "<")):
            return f"{name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
