"""The mode that sees what the dispatcher does not: `.data = ...`, deepcopy, tolist, raw memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from swaptrain.capture.init.exchange import become, user_attributes
from swaptrain.capture.init.record import OperationRecorder
from swaptrain.capture.init.replay import storage_key

__all__ = ["Intercept"]

_RAW_MEMORY = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.share_memory_,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    }
)
"""Functions that show memory which a fake tensor does not have."""


class Intercept(TorchFunctionMode):
    """Gives fake tensors the semantics of plain ones where torch would treat them differently."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.Tensor.tolist: self._tolist,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(isinstance(value, FakeTensor) for value in args[:2]):
            if func in _RAW_MEMORY:
                name = getattr(func, "__name__", str(func))
                raise self._recorder.refuse(f"the constructor uses Tensor.{name} of a large tensor")
            if func in self._special:
                return self._special[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Do `tensor.data = value`; where one of them is fake and one real, change the content."""
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            tensor.data = value
            return
        plain = value if isinstance(tensor, FakeTensor) else tensor
        if type(plain) not in (torch.Tensor, nn.Parameter) or not tensor.is_leaf:
            raise self._recorder.refuse(f"`.data =` between a fake and a {type(plain).__name__}")
        content = value.detach()
        if isinstance(tensor, nn.Parameter):
            content = nn.Parameter(content, tensor.requires_grad)
        become(tensor, content)

    def _deepcopy(self, tensor: FakeTensor, memo: dict[Any, Any]) -> torch.Tensor:
        """Copy as `Parameter.__deepcopy__` and `Tensor.__deepcopy__` copy plain tensors."""
        if id(tensor) in memo:
            copied: torch.Tensor = memo[id(tensor)]
            return copied
        if isinstance(tensor, nn.Parameter):
            clone = tensor.detach().clone(memory_format=torch.preserve_format)
            memo[id(tensor)] = copied = nn.Parameter(clone, tensor.requires_grad)
            return copied
        if not tensor.is_leaf:
            raise RuntimeError("only leaves of the autograd graph can be deep-copied")
        # A plain tensor's whole storage is copied, once for all its views.
        key = ("storage of a fake tensor", storage_key(tensor))
        with torch.no_grad():
            if key not in memo:
                elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
                memo[key] = tensor.as_strided((elements,), (1,), 0).clone()
            flat = memo[key]
            if flat.dtype != tensor.dtype:
                flat = flat.view(tensor.dtype)
            copied = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            copied = copied.detach()
        memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        vars(copied).update(copy.deepcopy(user_attributes(tensor), memo))
        return copied

    def _tolist(self, tensor: FakeTensor) -> Any:
        return self._recorder.values([tensor])[0].tolist()
