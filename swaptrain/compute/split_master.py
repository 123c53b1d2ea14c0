"""The split master: a float32 weight kept as its bfloat16 upper half and a 16-bit remainder.

The upper half is what the model computes with. Both halves together are the float32 bits, so the
optimizer works on exact float32 weights while the disk holds 4 bytes a weight, not 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_dense", "join", "split", "storage_order"]

BLOCK_ELEMENTS = 1 << 20


def storage_order(tensor: Tensor) -> Tensor:
    """Return all elements of a dense tensor as a view, [n], in the order they lie in memory.

    Dense means that the elements fill their storage without gaps or overlap, in any order of the
    dimensions (a transposed matrix, channels_last).

    Raises:
        ValueError: the tensor is not dense.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has "
            "gaps or overlaps; the state of a parameter must be dense"
        )
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of dimensions.

    Torch asks it too, but has no word for it in Python.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def join(hi: Tensor, lo: Tensor, out: Tensor, *, scratch: Tensor | None = None) -> None:
    """Write the float32 master of `hi` (bfloat16) and `lo` (int16 or uint16) into `out`.

    All three are dense with equally many elements, in the same order of memory. Exact for every
    bit pattern that `split` wrote: `bits = (hi << 16) + signed(lo)`, modulo 2^32 (a NaN's other
    bits depend on how the device widens it: a CPU shifts it). `scratch`, float32 with as many
    elements, spares the allocation of a temporary of that size.
    """
    hi_flat = storage_order(hi)  # [n], as all that follows
    # A bfloat16 is the upper half of a float32: to widen it is to shift its bits, in one pass.
    upper = hi_flat.float() if scratch is None else scratch.copy_(hi_flat)
    bits = storage_order(out).view(torch.int32)
    bits.copy_(storage_order(lo).view(torch.int16))
    bits.add_(upper.view(torch.int32))


def split(master: Tensor, hi: Tensor, lo: Tensor, *, consume: bool = False) -> None:
    """Write the two halves of `master` (float32) into `hi` (bfloat16) and `lo` (int16 or uint16).

    `hi = (bits + 0x8000) >> 16`, `lo = bits & 0xFFFF`. So `hi` is the master rounded to the nearest
    bfloat16, ties away from zero, and infinite where the master is above the largest bfloat16. A
    NaN master may leave a `hi` that is not a NaN; `join` still gives the NaN back. `consume`
    allows `master` to be overwritten, which saves a pass and a temporary of at most 4 MiB.
    """
    # [n] each
    master_flat, hi_flat, lo_flat = storage_order(master), storage_order(hi), storage_order(lo)
    if consume:
        split_bits(master_flat.view(torch.int32), hi_flat, lo_flat)
        return
    for start in range(0, master_flat.numel(), BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        bits = master_flat[block].view(torch.int32).clone()
        split_bits(bits, hi_flat[block], lo_flat[block])


def split_bits(bits: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Split int32 `bits`, [n], into the halves, [n] too, and overwrite `bits`."""
    # The conversions from int32 to int16 keep the low 16 bits; the sum wraps modulo 2^32.
    lo.view(torch.int16).copy_(bits)
    bits.add_(0x8000).bitwise_right_shift_(16)
    hi.view(torch.int16).copy_(bits)
