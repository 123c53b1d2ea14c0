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
from swaptrain.memory.limits import address_space_bytes
from swaptrain.memory.mapping import PAGE_BYTES, Mapping
from swaptrain.units import format_size

__all__ = ["PAGE_BYTES", "PinCallback", "Pool", "PoolExhausted", "Slab"]

PinCallback = Callable[[int, int], None]
"""Called with the address and the bytes of a mapping."""

_MOST_SHELLS = 256
"""Mappings without pages that are kept, since to map and to unmap takes time as well; none where
addresses are limited (ulimit -v)."""


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

    `held_bytes` is what is resident: `live_bytes`, which is in use, and the pages of free mappings,
    which wait for a `take` of exactly their size. When another size needs the room, pages of the
    longest unused ones become the new slab's, so that the kernel need not zero them again; pinned
    pages cannot move, so such mappings are given up whole. A slab that was given back while a view
    of it is still alive somewhere counts as in use until the last view is gone: it is neither
    reused (the view would change under its holder) nor unmapped (reading it would crash).

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
        self._used_bytes = 0  # of what is in use, views that outlive their slab included
        self._free: dict[Mapping, None] = {}  # the longest unused first
        self._shells: dict[Mapping, None] = {}  # free and without pages
        self._most_shells = _MOST_SHELLS if address_space_bytes() is None else 0
        self._viewed: dict[Mapping, weakref.ref[NDArray[np.uint8]]] = {}
        # Filled by weak references' callbacks, which may run inside any statement of any thread.
        self._unviewed: deque[Mapping] = deque()

    @property
    def live_bytes(self) -> int:
        """Bytes of slabs that are taken, or given back with views of them still alive."""
        with self._lock:
            self._collect()
            return self._used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are resident: in use and kept for reuse."""
        with self._lock:
            return self.live_bytes + self._free_bytes()

    def take(self, nbytes: int) -> Slab:
        """Return a slab of exactly `nbytes`, a multiple of 4096; its contents are undefined.

        Raises PoolExhausted when what is in use and `nbytes` together exceed the budget, OSError
        (ENOMEM) when the machine has no memory for it.
        """
        if nbytes <= 0 or nbytes % PAGE_BYTES:
            raise ValueError(f"a slab has a multiple of {PAGE_BYTES} bytes, not {nbytes}")
        with self._lock:
            self._collect()
            mapping = self._free_of(nbytes)
            if mapping is None or not mapping.is_resident:
                if self._used_bytes + nbytes > self.budget_bytes:
                    raise PoolExhausted(nbytes, self._used_bytes, self.budget_bytes)
                mapping = self._resident(mapping, nbytes)
            self._free.pop(mapping, None)
            self._used_bytes += nbytes
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
            self._release(max(0, self.budget_bytes - self._used_bytes))  # it may have shrunk

    def shrink(self, budget_bytes: int) -> None:
        """Lower the budget and unmap what is kept for reuse beyond it.

        Slabs that are taken stay; `take` refuses until enough of them are given back.
        """
        with self._lock:
            self.budget_bytes = min(self.budget_bytes, budget_bytes)
            self._collect()
            self._release(max(0, self.budget_bytes - self._used_bytes))

    def trim(self) -> None:
        """Unmap everything that is kept for reuse."""
        with self._lock:
            self._collect()
            self._release(0)
            self._drop_shells(0)

    def _on_last_view(self, mapping: Mapping) -> Callable[[object], None]:
        return lambda _: self._unviewed.append(mapping)

    def _collect(self) -> None:
        """Make those given-back slabs free whose last view has gone."""
        while self._unviewed:
            mapping = self._unviewed.popleft()
            del self._viewed[mapping]
            self._used_bytes -= mapping.nbytes
            self._free[mapping] = None

    def _free_bytes(self) -> int:
        return sum(mapping.resident_bytes for mapping in self._free)

    def _release(self, keep_bytes: int) -> None:
        """Give pages of free mappings back until at most `keep_bytes` of them remain."""
        excess_bytes = self._free_bytes() - keep_bytes
        for mapping in self._donors() if excess_bytes > 0 else ():
            if self._pin is None:
                had_bytes = mapping.resident_bytes
                mapping.drop_pages(excess_bytes)
                excess_bytes -= had_bytes - mapping.resident_bytes
                self._put_aside(mapping)
            else:
                excess_bytes -= mapping.nbytes
                self._give_up(mapping)
            if excess_bytes <= 0:
                return

    def _donors(self) -> list[Mapping]:
        """Return what is free: first what has lost pages already, then the longest unused."""
        return sorted(self._free, key=lambda mapping: mapping.is_resident)

    def _put_aside(self, mapping: Mapping) -> None:
        """Take note that a free mapping has lost pages."""
        if not mapping.resident_bytes:
            del self._free[mapping]
            self._shells[mapping] = None
            self._drop_shells(self._most_shells)

    def _drop_shells(self, most: int) -> None:
        while len(self._shells) > most:
            mapping = next(iter(self._shells))
            del self._shells[mapping]
            mapping.close()

    def _give_up(self, mapping: Mapping) -> None:
        del self._free[mapping]
        if self._unpin is not None:
            self._unpin(mapping.address, mapping.nbytes)
        mapping.close()

    def _free_of(self, nbytes: int) -> Mapping | None:
        """Return the mapping of this size, of those not in use, that has most of its pages."""
        fitting = [mapping for mapping in reversed(self._free) if mapping.nbytes == nbytes]
        if fitting:
            return max(fitting, key=lambda mapping: mapping.resident_bytes)
        return next((mapping for mapping in self._shells if mapping.nbytes == nbytes), None)

    def _resident(self, shell: Mapping | None, nbytes: int) -> Mapping:
        """Return a resident mapping: `shell`, which lacks pages, or a new one.

        Nothing is made resident before what it takes the place of is given back, so at no time is
        more resident than the budget. Raises OSError (ENOMEM).
        """
        mapping = shell or self._mapping(nbytes)
        self._free.pop(mapping, None)
        self._shells.pop(mapping, None)
        keep_bytes = self.budget_bytes - self._used_bytes - nbytes
        try:
            if self._pin is None:
                self._move_pages(mapping, keep_bytes)
            self._release(keep_bytes)
            mapping.populate()
        except BaseException:
            mapping.close()
            raise
        if self._pin is not None:
            mapping.keep_from_children()
            self._pin(mapping.address, nbytes)
        return mapping

    def _move_pages(self, mapping: Mapping, keep_bytes: int) -> None:
        """Take what a mapping lacks from free ones; from whole ones only where one has to go."""
        full = self._free_bytes() > keep_bytes
        for donor in self._donors():
            if mapping.is_resident or (donor.is_resident and not full):
                return
            if not mapping.take_pages(donor):
                return
            self._put_aside(donor)

    def _mapping(self, nbytes: int) -> Mapping:
        try:
            return Mapping(nbytes)
        except OSError:  # no addresses for it beside what is free (ulimit -v)
            self.trim()
            return Mapping(nbytes)
