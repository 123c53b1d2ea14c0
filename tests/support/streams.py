"""A device of ordinary memory whose queues are as late as they may be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["LateStreams"]


class LateStreams:
    """Copies at the last moment at which a correct program allows it.

    What is computed runs at once, as PyTorch on the CPU does. So a copy to the device that nothing
    waits for leaves what `empty` gave, which is all ones (NaN, -1); a slab that changes before the
    host has waited reaches the device changed, and a tensor that changes before the host has waited
    reaches its slab changed.
    """

    device = torch.device("cpu")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.brought = self.ahead = 0
        """Copies to the device; those that the host did not ask for at once."""
        self._in: list[Callable[[], object]] = []
        self._done = 0
        self._out: list[Callable[[], object]] = []

    @property
    def under_way(self) -> int:
        """Copies that the host has not waited for."""
        return len(self._in) - self._done + len(self._out)

    def empty(self, view: Tensor) -> Tensor:
        result = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype)
        result.untyped_storage().fill_(255)
        return result

    def bring(self, target: Tensor, view: Tensor) -> int:
        self.brought += 1
        self._in.append(lambda: target.copy_(view))
        return len(self._in)

    def compute_behind(self, mark: int) -> None:
        self.ahead += mark < len(self._in) or mark <= self._done
        self._copy_in(mark)

    def send(self, view: Tensor, source: Tensor) -> None:
        self._out.append(lambda: view.copy_(source))

    def synchronize(self) -> None:
        self._copy_in(len(self._in))
        while self._out:
            self._out.pop(0)()

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int, nbytes: int) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def _copy_in(self, mark: int) -> None:
        for number in range(self._done, mark):
            self._in[number]()
            self._in[number] = lambda: None  # what it held may go
        self._done = max(self._done, mark)
