"""The layout of one tensor, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

__all__ = ["ITEMSIZE", "TensorSpec", "contiguous"]

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, strides (in elements) and dtype (torch's and zarr's common name) of a tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of storage from the first to the last one that the tensor touches."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of storage that the tensor spans."""
        return self.extent * self.itemsize

    @property
    def overlaps(self) -> bool:
        """Whether two of its elements may be one place in memory (expanded, or sliding windows)."""
        if self.numel == 0:
            return False
        reached = 0
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if stride <= reached:
                    return True
                reached += (size - 1) * stride
        return False

    @property
    def is_dense(self) -> bool:
        """Whether its elements fill their memory, in any order of the dimensions."""
        return self.extent == self.numel and not self.overlaps

    def without_holes(self) -> TensorSpec:
        """Return the layout of what belongs to it: its own, or where it has holes, row-major."""
        return self if self.is_dense else replace(self, stride=contiguous(self.shape))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
