"""Tensors that have a shape and strides but no memory: leaves of a graph after its forward."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

__all__ = ["MemorylessTensors"]


class MemorylessTensors:
    """Makes tensors that take no memory and must not be read.

    On the host they are views of one range of addresses that is never touched, and of one storage.
    Memory of their own, taken and given back at once, would do as well for the numbers, but glibc
    puts the record of the storage, which stays, right behind that memory: a hole that nothing of
    the same size fits into any more remains with each leaf, and the heap grows with every forward
    (65 MiB a segment were seen).
    """

    def __init__(self) -> None:
        self._addresses = torch.empty(0, dtype=torch.uint8)

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape, strides, dtype and device."""
        if tensor.device.type != "cpu":
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            empty.untyped_storage().resize_(0)
            return empty
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = 0 if tensor.numel() == 0 else (last + 1) * tensor.element_size()
        if nbytes > self._addresses.numel():
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._addresses = torch.frombuffer(memory, dtype=torch.uint8)
        flat = self._addresses[:nbytes].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())
