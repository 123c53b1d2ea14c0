"""Keeps what autograd saves in a forward in a slab, so that the backward need not recompute it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SavedTensors"]

_ALIGNMENT_BYTES, _DEVICE_ALIGNMENT_BYTES = 64, 512
_FEW_ELEMENTS = 16
"""A dropout's seed and offset, an index: no memory to speak of, and no copy to wait for."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
class _Kept:
    """What is in memory anyway, or a few numbers that the host has computed."""

    tensor: Tensor


_Packed = _Operand | _Copied | _Kept


class SavedTensors:
    """What autograd saves while one segment runs forward; `pack` and `unpack` are its hooks.

    Parts of `operands`, which the backward gets too, are saved as a name and an offset, so that
    their own memory may be given up meanwhile and be elsewhere then. Parts of `constants` stay as
    they are. Everything else is copied into `memory` (uint8, where it is computed), each storage
    once, so that what torch allocated is free when the forward ends; who gives it sees to it that
    `open` gets the same bytes again. Without `memory` the copies are kept beside it, only to find
    out `nbytes`, `count` and `matches`. Where `memory` is too small, or a tensor is
    not plain numbers with strides (sparse, quantised, conjugated or negated when it is read),
    `complete` becomes False, and what was saved is of no use.

    A storage that is saved again has to hold what it held. With `bring_back`, that of a device
    which computes beside the host, nothing waits to find out: it is taken to hold what it held when
    `matches` were found, and the host has the answer after the next mark.
    """

    def __init__(
        self,
        operands: Mapping[str, Tensor],
        constants: Iterable[Tensor],
        memory: Tensor | None,
        *,
        bring_back: Callable[[Tensor], Tensor] | None = None,
        matches: Mapping[int, int | None] = {},
    ) -> None:
        self.nbytes = 0
        """Of `memory`, in use."""
        self.count = 0
        """Tensors that were saved."""
        self.complete = True
        self.matches: dict[int, int | None] = {}
        """By the number of a tensor whose storage was saved before: which of the pieces that it is
        a part of holds the same, if one does."""
        self._known_matches, self._bring_back = matches, bring_back
        self._changed: list[Tensor] = []
        """Whether a storage that was saved again has changed, bool [], on the device."""
        self._any_changed: Tensor | None = None
        """On the host, after the mark that follows `seal`."""
        self._memory = memory
        self._operands = operands
        self._ranges = _ranges([*operands.items(), *(("", tensor) for tensor in constants)])
        self._starts = [start for start, _, _ in self._ranges]
        self._copies: dict[tuple[int, int, torch.dtype], list[tuple[int, int, Tensor]]] = {}
        """By storage, version and dtype: where each piece begins there, and its copy in memory."""
        self._storages: list[StorageWeakRef] = []  # so that no other one gets the same identity

    def pack(self, tensor: Tensor) -> _Packed | None:
        """Take a tensor that autograd saves, as it is now."""
        self.count += 1
        if not _is_plain(tensor):
            self.complete = False
        if not self.complete:
            return None
        begin = tensor.data_ptr()
        span_bytes = _span(tensor) * tensor.element_size()
        index = bisect_right(self._starts, begin) - 1
        if index >= 0 and span_bytes:
            start, end, name = self._ranges[index]
            if begin + span_bytes <= end and not name:
                return _Kept(tensor.detach())
            if begin + span_bytes <= end and self._operands[name].dtype == tensor.dtype:
                return _Operand(name, _layout(tensor, (begin - start) // tensor.element_size()))
        if self._bring_back and tensor.device.type == "cpu" and tensor.numel() <= _FEW_ELEMENTS:
            return _Kept(tensor.detach().clone())  # of the host, which has to have it again
        return self._copy(tensor)

    def unpack(self, packed: _Packed | None) -> Tensor:
        """Return what was taken, for the backward that `open` has begun."""
        if isinstance(packed, _Kept):
            return packed.tensor
        if isinstance(packed, _Operand):
            return packed.layout.of(self._operands[packed.name])
        assert packed is not None and self._memory is not None, "saved completely, and opened"
        layout, piece = packed.layout, self._memory[packed.start : packed.end]
        if layout.device != piece.device:  # a number that the host has computed
            piece = piece.to(layout.device)
        return layout.of(piece.view(layout.dtype))

    def seal(self) -> None:
        """End the forward: its operands and memory may be given up."""
        if self._changed and self._bring_back is not None:
            self._any_changed = self._bring_back(torch.stack(self._changed).any())
            self._changed.clear()
        self._operands, self._memory = {}, None
        self._ranges, self._starts = [], []
        self._copies.clear()
        self._storages.clear()

    def open(self, operands: Mapping[str, Tensor], memory: Tensor) -> bool:
        """Begin the backward: say where the operands and the content of the slab are now.

        False where what was saved is of no use after all.
        """
        self._operands, self._memory = operands, memory
        return self._any_changed is None or not self._any_changed

    def _copy(self, tensor: Tensor) -> _Copied | None:
        storage, itemsize = tensor.untyped_storage(), tensor.element_size()
        own_first, own_count = int(tensor.storage_offset()), _span(tensor)
        key = int(storage._cdata), tensor._version, tensor.dtype
        parts = [
            (start, piece, _layout(tensor, own_first - first))
            for first, start, piece in self._copies.get(key, [])
            if first <= own_first and own_first + own_count <= first + piece.numel()
        ]
        match = self._match([layout.of(piece) for _, piece, layout in parts], tensor.detach())
        if match is not None:
            start, piece, layout = parts[match]
            return _Copied(start, start + piece.numel() * itemsize, layout)
        first, count, whole = own_first, own_count, storage.nbytes() // itemsize
        if 2 * count >= whole and storage.nbytes() % itemsize == 0:
            first, count = 0, whole  # other parts of it are likely to follow
        # Kernels may choose by the address: what began between two cache lines does so again, and
        # on a device between two blocks of torch's allocator.
        alignment = _ALIGNMENT_BYTES if tensor.device.type == "cpu" else _DEVICE_ALIGNMENT_BYTES
        start = -(-self.nbytes // alignment) * alignment + first * itemsize % alignment
        self.nbytes = start + count * itemsize
        if self._memory is None:
            piece = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
        elif self.nbytes <= self._memory.numel():
            piece = self._memory[start : self.nbytes].view(tensor.dtype)
        else:
            self.complete = False
            return None
        with torch.no_grad():
            piece.copy_(tensor.detach().as_strided((count,), (1,), first))
        self._copies.setdefault(key, []).append((first, start, piece))
        self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return _Copied(start, self.nbytes, _layout(tensor, own_first - first))

    def _match(self, parts: Sequence[Tensor], tensor: Tensor) -> int | None:
        """Return which of these parts of pieces holds what a tensor of the same storage does.

        Some views have versions of their own: unsafe_chunk's, in recurrent layers.
        """
        integers = _INTEGERS.get(tensor.element_size())
        if not parts or integers is None:
            return None
        now = tensor.to(parts[0].device).view(integers)
        if self._bring_back is None or self._memory is None:
            found = (n for n, part in enumerate(parts) if torch.equal(part.view(integers), now))
            match = self.matches[self.count] = next(found, None)
            return match
        match = self._known_matches.get(self.count, 0)
        if match is None or match >= len(parts):
            return None
        self._changed.append((parts[match].view(integers) != now).any())
        return match


def _layout(tensor: Tensor, offset: int) -> _Layout:
    return _Layout(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.device)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a copy of the tensor's part of its storage says everything about it."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and not tensor.is_conj() and not tensor.is_neg()


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
