"""A byte budget of aligned memory: slabs that are taken, given back and reused."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from swaptrain.errors import SwaptrainError
from swaptrain.memory.mapping import PAGE_BYTES, Mapping, resident
from swaptrain.units import format_size

__all__ = ["PAGE_BYTES", "PinCallback", "Pool", "PoolExhausted", "Slab"]

PinCallback = Callable[[int, int], None]
"""Called with the address and the bytes of a mapping."""


class PoolExhausted(SwaptrainError):
    """A slab was asked for that the budget has no room for; what is in use must go first."""

    def __init__(self, needed_bytes: int, live_bytes: int, budget_bytes: int) -> None:
        self.needed_bytes, self.live_bytes, self.budget_bytes = (
            needed_bytes,
            live_bytes,
            budget_bytes,
        )
        super().__init__(
            f"{format_size(needed_bytes)} are needed, and {format_size(live_bytes)} of the pool's "
            f"{format_size(budget_bytes)} are in use: raise memory.host by "
            f"{format_size(live_bytes + needed_bytes - budget_bytes)} or more"
        )


class Slab:
    """A piece of memory that belongs to its holder until it is given back to the pool.

    Views (`memory`, `tensor`) share the memory without a copy and keep it mapped while they live.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._view: NDArray[np.uint8] | None = mapping.view()

    @property
    def nbytes(self) -> int:
        """Bytes, a multiple of 4096."""
        return self._mapping.nbytes

    @property
    def memory(self) -> memoryview:
        """The bytes, writable; the first one lies on a multiple of 4096."""
        return self._array().data

    def tensor(self, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """Return a 1-D tensor of `numel` elements that starts at `offset_bytes`."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._array(), dtype=dtype, count=numel, offset=offset_bytes)

    def _array(self) -> NDArray[np.uint8]:
        if self._view is None:
            raise ValueError("the slab was given back to its pool")
        return self._view


class Pool:
    """Slabs whose bytes, in use and kept for reuse together, never exceed a budget.

    `held_bytes` is what is mapped (and touched, so resident): `live_bytes`, which is in use, and
    free slabs, which wait for a `take` of exactly their size. When another size needs the room,
    the longest unused ones are given up, and their pages become the new slab's. A slab that was
    given back while a view of it is still alive somewhere counts as in use until the last view is
    gone: it is neither reused (the view would change under its holder) nor unmapped (reading it
    would crash).

    `pin` and `unpin` are called after a mapping is made and before it is undone. Thread-safe.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        pin: PinCallback | None = None,
        unpin: PinCallback | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._pin, self._unpin = pin, unpin
        self._lock = threading.RLock()
        self._live: set[Slab] = set()
        self._free: dict[Mapping, None] = {}  # the longest unused first
        self._viewed: dict[Mapping, weakref.ref[NDArray[np.uint8]]] = {}
        # Filled by weak references' callbacks, which may run inside any statement of any thread.
        self._unviewed: deque[Mapping] = deque()

    @property
    def live_bytes(self) -> int:
        """Bytes of slabs that are taken, or given back with views of them still alive."""
        with self._lock:
            self._collect()
            return self._used_bytes()

    @property
    def held_bytes(self) -> int:
        """Bytes that are mapped: in use and kept for reuse."""
        with self._lock:
            return self.live_bytes + sum(mapping.nbytes for mapping in self._free)

    def take(self, nbytes: int) -> Slab:
        """Return a slab of exactly `nbytes`, a multiple of 4096; its contents are undefined.

        Raises PoolExhausted when what is in use and `nbytes` together exceed the budget, OSError
        (ENOMEM) when the machine has no memory for it.
        """
        if nbytes <= 0 or nbytes % PAGE_BYTES:
            raise ValueError(f"a slab has a multiple of {PAGE_BYTES} bytes, not {nbytes}")
        with self._lock:
            self._collect()
            mapping = next((m for m in reversed(self._free) if m.nbytes == nbytes), None)
            if mapping is not None:
                del self._free[mapping]
            else:
                used_bytes = self._used_bytes()
                if used_bytes + nbytes > self.budget_bytes:
                    raise PoolExhausted(nbytes, used_bytes, self.budget_bytes)
                mapping = self._map(nbytes, self.budget_bytes - used_bytes - nbytes)
            slab = Slab(mapping)
            self._live.add(slab)
            return slab

    def give(self, slab: Slab) -> None:
        """Take a slab back; it must not be used afterwards."""
        with self._lock:
            if slab not in self._live:
                raise ValueError("the slab does not belong to this pool, or was given back before")
            self._live.remove(slab)
            mapping = slab._mapping
            self._viewed[mapping] = weakref.ref(slab._array(), self._on_last_view(mapping))
            slab._view = None
            self._collect()
            self._release(max(0, self.budget_bytes - self._used_bytes()))  # it may have shrunk

    def shrink(self, budget_bytes: int) -> None:
        """Lower the budget and unmap what is kept for reuse beyond it.

        Slabs that are taken stay; `take` refuses until enough of them are given back.
        """
        with self._lock:
            self.budget_bytes = min(self.budget_bytes, budget_bytes)
            self._collect()
            self._release(max(0, self.budget_bytes - self._used_bytes()))

    def trim(self) -> None:
        """Unmap every slab that is kept for reuse."""
        with self._lock:
            self._collect()
            self._release(0)

    def _on_last_view(self, mapping: Mapping) -> Callable[[object], None]:
        return lambda _: self._unviewed.append(mapping)

    def _used_bytes(self) -> int:
        viewed = sum(mapping.nbytes for mapping in self._viewed)
        return viewed + sum(slab.nbytes for slab in self._live)

    def _collect(self) -> None:
        """Make those given-back slabs free whose last view has gone."""
        while self._unviewed:
            mapping = self._unviewed.popleft()
            del self._viewed[mapping]
            self._free[mapping] = None

    def _release(self, keep_bytes: int) -> None:
        """Unmap free slabs, the longest unused first, until at most `keep_bytes` of them remain."""
        for mapping in self._spare(keep_bytes):
            mapping.close()

    def _spare(self, keep_bytes: int, least_bytes: int = 0) -> list[Mapping]:
        """Take out free slabs, the longest unused first, until at most `keep_bytes` remain.

        If that takes any, then as many as make up `least_bytes`, or all.
        """
        free_bytes = sum(mapping.nbytes for mapping in self._free)
        spare: list[Mapping] = []
        spare_bytes = 0
        while free_bytes > keep_bytes or (spare and self._free and spare_bytes < least_bytes):
            mapping = next(iter(self._free))
            del self._free[mapping]
            free_bytes -= mapping.nbytes
            spare_bytes += mapping.nbytes
            if self._unpin is not None:
                self._unpin(mapping.address, mapping.nbytes)
            spare.append(mapping)
        return spare

    def _map(self, nbytes: int, keep_bytes: int) -> Mapping:
        """Return a new mapping beside which `keep_bytes` of free ones may stay.

        It takes the place of others, and what remains of these is kept; but not of pinned memory,
        where to pin the rest anew could cost more than it saves.
        """
        spare = self._spare(keep_bytes, nbytes if self._pin is None else 0)
        keep_bytes -= sum(mapping.nbytes for mapping in self._free)
        mapping, rest = resident(nbytes, spare, rest_bytes=keep_bytes if self._pin is None else 0)
        if rest is not None:
            self._free[rest] = None
        if self._pin is not None:
            self._pin(mapping.address, nbytes)
        return mapping
