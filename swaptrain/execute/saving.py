"""Keeps what autograd saves in a forward in a slab, so that the backward need not recompute it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SavedTensors"]

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class _Layout:
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements, from the start of what it is a part of."""
    device: torch.device

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of `whole`, a tensor of the same dtype."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Operand:
    """A part of a tensor that the backward is given as well."""

    name: str
    layout: _Layout


@dataclass(frozen=True)
class _Copied:
    """A part of a piece of the slab."""

    start: int
    end: int
    layout: _Layout


@dataclass(frozen=True)
class _Constant:
    """A part of what is in memory anyway."""

    tensor: Tensor


_Packed = _Operand | _Copied | _Constant


class SavedTensors:
    """What autograd saves while one segment runs forward; `pack` and `unpack` are its hooks.

    Parts of `operands`, which the backward gets too, are saved as a name and an offset, so that
    their own memory may be given up meanwhile and be elsewhere then. Parts of `constants` stay as
    they are. Everything else is copied into `memory` (uint8, on the host), each storage once, so
    that what torch allocated is free when the forward ends. Without `memory` only `nbytes` is
    counted. Where `memory` is too small nothing more is saved, and `complete` is False.
    """

    def __init__(
        self,
        operands: Mapping[str, Tensor],
        constants: Iterable[Tensor],
        memory: Tensor | None,
    ) -> None:
        self.nbytes = 0
        """Of `memory`, in use."""
        self.complete = True
        self._memory = memory
        self._operands = operands
        self._ranges = _ranges([*operands.items(), *(("", tensor) for tensor in constants)])
        self._starts = [start for start, _, _ in self._ranges]
        self._copies: dict[tuple[int, int, int], tuple[int, int]] = {}
        """By storage, its version, and where the piece begins: where its copy lies."""
        self._storages: list[StorageWeakRef] = []  # so that no other one gets the same identity
        self._brought: dict[tuple[int, int], Tensor] = {}
        """Copies on the device of pieces of the slab, while the backward runs."""

    def pack(self, tensor: Tensor) -> _Packed | None:
        """Take a tensor that autograd saves, as it is now."""
        begin = tensor.data_ptr()
        span_bytes = _span(tensor) * tensor.element_size()
        index = bisect_right(self._starts, begin) - 1
        if index >= 0 and span_bytes:
            start, end, name = self._ranges[index]
            if begin + span_bytes <= end and not name:
                return _Constant(tensor.detach())
            if begin + span_bytes <= end and self._operands[name].dtype == tensor.dtype:
                return _Operand(name, _layout(tensor, (begin - start) // tensor.element_size()))
        return self._copy(tensor)

    def unpack(self, packed: _Packed | None) -> Tensor:
        """Return what was taken, for the backward that `open` has begun."""
        if isinstance(packed, _Constant):
            return packed.tensor
        if isinstance(packed, _Operand):
            return packed.layout.of(self._operands[packed.name])
        assert packed is not None and self._memory is not None, "saved completely, and opened"
        layout, piece = packed.layout, self._memory[packed.start : packed.end]
        if layout.device != piece.device:
            place = packed.start, packed.end
            if place not in self._brought:
                self._brought[place] = piece.to(layout.device)
            piece = self._brought[place]
        return layout.of(piece.view(layout.dtype))

    def seal(self) -> None:
        """End the forward: its operands and memory may be given up."""
        self._operands, self._memory = {}, None
        self._ranges, self._starts = [], []
        self._copies.clear()
        self._storages.clear()

    def open(self, operands: Mapping[str, Tensor], memory: Tensor) -> None:
        """Begin the backward: say where the operands and the content of the slab are now."""
        self._operands, self._memory = operands, memory

    def _copy(self, tensor: Tensor) -> _Copied | None:
        storage, itemsize = tensor.untyped_storage(), tensor.element_size()
        own_first = int(tensor.storage_offset())
        first, count = own_first, _span(tensor)
        whole = storage.nbytes() // itemsize
        if 2 * count >= whole and storage.nbytes() % itemsize == 0:
            first, count = 0, whole  # other parts of it are likely to follow
        key = int(storage._cdata), tensor._version, first * itemsize
        place = self._copies.get(key)
        if place is None or place[1] - place[0] < count * itemsize:
            start = -(-self.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            place = start, start + count * itemsize
            self.nbytes = place[1]
            self._copies[key] = place
            self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            if self._memory is not None:
                self.complete = self.complete and place[1] <= self._memory.numel()
                if self.complete:
                    piece = self._memory[place[0] : place[1]].view(tensor.dtype)
                    with torch.no_grad():
                        piece.copy_(tensor.detach().as_strided((count,), (1,), first))
        if self._memory is None or not self.complete:
            return None
        return _Copied(*place, _layout(tensor, own_first - first))


def _layout(tensor: Tensor, offset: int) -> _Layout:
    return _Layout(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.device)


def _span(tensor: Tensor) -> int:
    """Return the elements of storage from the first to the last one of a tensor."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _ranges(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[int, int, str]]:
    """Return begin and end in memory, and the name, of each tensor that has content."""
    ranges = [
        (tensor.data_ptr(), tensor.data_ptr() + _span(tensor) * tensor.element_size(), name)
        for name, tensor in tensors
    ]
    return sorted(entry for entry in ranges if entry[1] > entry[0])
