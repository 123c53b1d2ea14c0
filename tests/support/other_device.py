"""A device that is none: tensors that say they are on a GPU, and refuse what a GPU refuses.

What they hold lies in ordinary memory, and what is done to them is done there by the CPU's kernels.
So a run on this device has the CPU's bits, if it brings every tensor to where it is computed with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.streams import LateStreams

__all__ = ["DEVICE", "OtherStreams"]

_setup_privateuseone_for_python_backend("other")
DEVICE = torch.device("other", 0)

_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
"""Operations that take tensors of two devices."""


class OtherTensor(Tensor):
    """A tensor of `DEVICE`; `held` is where its numbers are."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OtherTensor:
        made: OtherTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"OtherTensor({tuple(self.shape)}, {self.dtype})"


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation with what the tensors hold; refuse tensors of two devices."""
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, OtherTensor)]
    there = [tensor for tensor in tensors if not isinstance(tensor, OtherTensor) and tensor.dim()]
    if here and there and function not in _COPIES:
        raise RuntimeError(
            f"{function}: expected all tensors to be on the same device, found {DEVICE} and cpu"
        )
    wanted = kwargs.get("device")
    on_device = bool(here) if wanted is None else torch.device(wanted).type == DEVICE.type
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if function is torch.ops.aten._to_copy.default and on_device and not here:
        function = _copied  # not the same memory
    elif function is torch.ops.aten.copy_.default:
        on_device = isinstance(args[0], OtherTensor)
    held = {id(tensor.held): tensor for tensor in here}

    def inside(item: Any) -> Any:
        return item.held if isinstance(item, OtherTensor) else item

    def outside(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if id(item) in held:
            return held[id(item)]
        return OtherTensor(item) if on_device else item

    return tree_map(outside, function(*tree_map(inside, args), **tree_map(inside, kwargs)))


def _copied(tensor: Tensor, **kwargs: Any) -> Tensor:
    made: Tensor = torch.ops.aten._to_copy.default(tensor, **kwargs)
    return made


class OtherStreams(LateStreams):
    """The queues of `DEVICE`: late, and between two kinds of tensors."""

    device = DEVICE

    def empty(self, view: Tensor) -> Tensor:
        return OtherTensor(super().empty(view))


def _empty(
    size: list[int], *, dtype: torch.dtype | None = None, memory_format: Any = None, **_: Any
) -> Tensor:
    return OtherTensor(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(
    size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return OtherTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    target, source = (t.held if isinstance(t, OtherTensor) else t for t in (target, source))
    return target.copy_(source)


# What makes tensors has none whose class could see it; all else that makes some is made of these.
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
