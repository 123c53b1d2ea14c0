"""Where each tensor of a segment lies in the segment's arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from swaptrain.errors import ConfigError
from swaptrain.program.roles import Role, role_of
from swaptrain.program.tensors import ITEMSIZE, TensorSpec

__all__ = ["ALIGNMENT_BYTES", "Alike", "ArrayEntry", "ArrayLayout", "SegmentLayout", "lay_out"]

ALIGNMENT_BYTES = 64
_ALIGNMENT_ELEMENTS = 32
"""The same of what has two bytes: then the arrays of the same tensors have the same offsets."""
_NARROWEST = 2
"""The bytes of an element, at the least, in arrays that have as many chunks as each other."""
PAGE_BYTES = 4096


@dataclass(frozen=True)
class ArrayEntry:
    """A tensor and where it starts in its array, in elements; the start is 64-byte aligned."""

    tensor: TensorSpec
    offset: int
    start: int = 0
    """In a part of an array: how many elements of the tensor's memory lie in the parts before."""


@dataclass(frozen=True)
class ArrayLayout:
    """A 1-D array of equal chunks, each one file of a multiple of 4096 bytes."""

    name: str
    dtype: str
    entries: tuple[ArrayEntry, ...]
    chunk_bytes: int
    chunks: int

    @property
    def role(self) -> Role:
        """Of an array of a segment's state."""
        return role_of(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, padding included."""
        return self.chunk_bytes * self.chunks

    @property
    def length(self) -> int:
        """Elements, padding included."""
        return self.nbytes // ITEMSIZE[self.dtype]

    def part(self, first: int, chunks: int) -> ArrayLayout:
        """Return the layout of some chunks alone, with what they hold of each tensor, 1-D."""
        chunk = self.length // self.chunks
        begin, end = first * chunk, (first + chunks) * chunk
        entries = []
        for entry in self.entries:
            low = max(begin, entry.offset)
            count = min(end, entry.offset + entry.tensor.extent) - low
            if count > 0:
                tensor = TensorSpec(entry.tensor.name, (count,), (1,), self.dtype)
                entries.append(ArrayEntry(tensor, low - begin, start=low - entry.offset))
        return ArrayLayout(self.name, self.dtype, tuple(entries), self.chunk_bytes, chunks)


@dataclass(frozen=True)
class SegmentLayout:
    """The arrays that one slot holds."""

    arrays: tuple[ArrayLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, padding included."""
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def shape_class(self) -> str:
        """A short stable name; slots of one shape class are interchangeable."""
        text = "|".join(f"{a.name} {a.dtype} {a.chunks}x{a.chunk_bytes}" for a in self.arrays)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def array(self, name: str) -> ArrayLayout:
        """Return the array of that name; raises KeyError."""
        for array in self.arrays:
            if array.name == name:
                return array
        raise KeyError(name)

    def table(self) -> list[dict[str, object]]:
        """Return one JSON-ready row per tensor: what a reader needs to find it."""
        return [
            {
                "name": entry.tensor.name,
                "shape": entry.tensor.shape,
                "stride": entry.tensor.stride,
                "dtype": entry.tensor.dtype,
                "array": array.name,
                "offset": entry.offset,
            }
            for array in self.arrays
            for entry in array.entries
        ]


@dataclass(frozen=True)
class Alike:
    """What arrays have in common that are divided together: the same elements in each part."""

    tensors: Sequence[TensorSpec]
    """That have a place in each of the arrays, though not every one has all of them."""
    widest: int
    """Bytes of the widest element."""
    narrowest: int = _NARROWEST
    """Bytes of the narrowest one."""
    alignment: int = _ALIGNMENT_ELEMENTS
    """A part begins at a multiple of so many elements of a tensor."""


def lay_out(
    name: str,
    dtype: str,
    tensors: Sequence[TensorSpec],
    *,
    chunk_limit_bytes: int,
    alike: Alike | None = None,
) -> ArrayLayout:
    """Place tensors one after the other, in the fewest equal chunks that are within the limit.

    The chunks are as small as equal ones can be, so the padding is less than 4096 bytes per chunk.
    A tensor may lie across chunks. Arrays that are `alike` get as many chunks, of as many elements,
    and a tensor the same place in each. Raises ConfigError for
    a limit below 4096 bytes, ValueError for a tensor of another dtype or no tensors (an array
    without entries is not created).
    """
    if chunk_limit_bytes < PAGE_BYTES:
        raise ConfigError(
            f"store.chunk is {chunk_limit_bytes} bytes: set it to 4KiB or more (64MiB is usual)"
        )
    if not tensors:
        raise ValueError(f"array {name} has no tensors")
    itemsize = ITEMSIZE[dtype]
    alignment = max(alike.alignment if alike else _ALIGNMENT_ELEMENTS, ALIGNMENT_BYTES // itemsize)
    own = {tensor.name: tensor for tensor in tensors}
    entries, end = [], 0
    for placed in alike.tensors if alike else tensors:
        offset = -(-end // alignment) * alignment
        end = offset + placed.extent
        if (tensor := own.get(placed.name)) is None:
            continue
        if tensor.dtype != dtype:
            raise ValueError(f"array {name} is {dtype}, its tensor {tensor.name} {tensor.dtype}")
        entries.append(ArrayEntry(tensor, offset))
    page = PAGE_BYTES // (alike.narrowest if alike else itemsize)
    pages = max(1, -(-end // page))
    widest = max(alike.widest if alike else 0, itemsize)
    chunks = -(-pages // max(1, chunk_limit_bytes // (page * widest)))
    return ArrayLayout(name, dtype, tuple(entries), -(-pages // chunks) * page * itemsize, chunks)
