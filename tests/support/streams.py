"""A device of ordinary memory whose queues are as late as they may be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["LateStreams"]


@dataclass
class _Copy:
    view: Tensor
    """Of a slab."""
    run: Callable[[], object]


@dataclass(frozen=True)
class _Mark:
    """How many copies of each queue lie before it."""

    brought: int = 0
    sent: int = 0


class LateStreams:
    """Copies at the last moment at which a correct program allows it.

    What is computed runs at once, as PyTorch on the CPU does. So a copy to the device that nothing
    waits for leaves what `empty` gave, which is all ones (NaN, -1); a slab that changes before the
    host has waited, or goes to another object, reaches the device changed, and a tensor that
    changes before the host has waited reaches its slab changed.
    """

    device = torch.device("cpu")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.brought = self.ahead = 0
        """Copies to the device; those that the host did not ask for at once."""
        self.overlapped = 0
        """Waits of the host that left something under way."""
        self._in: list[_Copy | None] = []
        self._out: list[_Copy | None] = []
        self._done = _Mark()

    @property
    def under_way(self) -> int:
        """Copies that nobody has waited for."""
        return sum(copy is not None for copy in (*self._in, *self._out))

    def reaches(self, memory: Tensor) -> bool:
        """Whether a copy into the memory of a slab is under way."""
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        return any(begin <= c.view.data_ptr() < end for c in self._out if c is not None)

    def empty(self, view: Tensor) -> Tensor:
        result = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype)
        result.untyped_storage().fill_(255)
        return result

    def bring(self, target: Tensor, view: Tensor, behind: Sequence[_Mark]) -> _Mark:
        self.brought += 1
        view = _unheld(view)

        def copy() -> None:
            for mark in behind:
                self._carry_out(mark)
            target.copy_(view)

        self._in.append(_Copy(view, copy))
        return _Mark(brought=len(self._in))

    def compute_behind(self, mark: _Mark) -> None:
        self.ahead += not self._done.brought < mark.brought == len(self._in)
        self._carry_out(mark)

    def send(self, view: Tensor, source: Tensor) -> _Mark:
        view = _unheld(view)
        self._out.append(_Copy(view, lambda: view.copy_(source)))
        return _Mark(sent=len(self._out))

    def host_copy(self, source: Tensor) -> Tensor:
        copy = torch.empty(source.shape, dtype=source.dtype)
        copy.untyped_storage().fill_(255)
        return copy

    def compute_mark(self) -> None:
        pass

    def seconds(self, first: None, last: _Mark) -> None:
        pass

    def mark(self) -> _Mark:
        return _Mark(len(self._in), len(self._out))

    def wait(self, mark: _Mark) -> None:
        self._carry_out(mark)
        self.overlapped += self.mark() != self._done

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int, nbytes: int) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def allocator_bytes(self) -> None:
        return None

    def give_back_cached(self) -> None:
        pass

    def _carry_out(self, mark: _Mark) -> None:
        """Make all copies up to a mark that are still to be made."""
        while self._done.brought < mark.brought:
            self._done = replace(self._done, brought=self._done.brought + 1)
            _run(self._in, self._done.brought - 1)
        while self._done.sent < mark.sent:
            self._done = replace(self._done, sent=self._done.sent + 1)
            _run(self._out, self._done.sent - 1)


def _unheld(view: Tensor) -> Tensor:
    """Return the memory of a view as a device has it: by its address, which keeps nobody away."""
    if not view.numel():
        return view
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * view.element_size())).from_address(view.data_ptr())
    return torch.frombuffer(memory, dtype=view.dtype).as_strided(view.shape, view.stride())


def _run(queue: list[_Copy | None], number: int) -> None:
    copy, queue[number] = queue[number], None  # what it held may go
    assert copy is not None
    copy.run()
