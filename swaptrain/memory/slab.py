"""Aligned memory under a byte budget: slabs that are taken, given back and reused."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swaptrain.errors import SwaptrainError
from swaptrain.memory.mapping import PAGE_BYTES
from swaptrain.spans import spanned
from swaptrain.units import format_size

__all__ = ["PAGE_BYTES", "Pool", "PoolExhausted", "Slab", "SlabMemory", "SlabPool"]


class PoolExhausted(SwaptrainError):
    """A slab was asked for that the budget has no room for; what is in use must go first."""

    def __init__(self, needed_bytes: int, live_bytes: int, budget_bytes: int) -> None:
        self.needed_bytes, self.live_bytes, self.budget_bytes = (
            needed_bytes,
            live_bytes,
            budget_bytes,
        )
        missing_bytes = live_bytes + needed_bytes - budget_bytes
        if missing_bytes <= 0:  # what is free lies in pieces
            missing_bytes = needed_bytes
        super().__init__(
            f"{format_size(needed_bytes)} are needed, and {format_size(live_bytes)} of the pool's "
            f"{format_size(budget_bytes)} are in use: raise memory.host by "
            f"{format_size(missing_bytes)} or more"
        )


class SlabMemory(Protocol):
    """Where the bytes of a slab are."""

    nbytes: int
    """A multiple of 4096."""

    def view(self) -> NDArray[np.uint8]:
        """Return the bytes as a new array, which every later view refers to."""


class Slab:
    """A piece of memory that belongs to its holder until it is given back to the pool.

    Views (`memory`, `tensor`) share the memory without a copy and keep it mapped while they live.
    """

    def __init__(self, place: SlabMemory) -> None:
        self._place = place
        self._view: NDArray[np.uint8] | None = place.view()

    @property
    def nbytes(self) -> int:
        """Bytes, a multiple of 4096."""
        return self._place.nbytes

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


class Pool(Protocol):
    """What a tier needs of the memory that it has."""

    budget_bytes: int

    @property
    def live_bytes(self) -> int:
        """Bytes of slabs that are taken, or given back with views of them still alive."""

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` gives a slab of `nbytes`."""

    def take(self, nbytes: int) -> Slab:
        """Return a slab of exactly `nbytes`, a multiple of 4096; its contents are undefined."""

    def give(self, slab: Slab) -> None:
        """Take a slab back; it must not be used afterwards."""

    def join(self, nbytes: int, most_bytes: int) -> bool:
        """Make room where the bytes are free, but in pieces; return whether there is room."""


class SlabPool(ABC):
    """A pool whose slabs are memory.

    `held_bytes` is what is resident: `live_bytes`, which is in use, and what is kept for reuse;
    together they never exceed the budget. A slab that was given back while a view of it is still
    alive somewhere counts as in use until the last view is gone: it is neither reused (the view
    would change under its holder) nor unmapped (reading it would crash). Thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.RLock()
        self._live: set[Slab] = set()
        self._used_bytes = 0  # of what is in use, views that outlive their slab included
        self._viewed: dict[SlabMemory, weakref.ref[NDArray[np.uint8]]] = {}
        # Filled by weak references' callbacks, which may run inside any statement of any thread.
        self._unviewed: deque[SlabMemory] = deque()

    @property
    def live_bytes(self) -> int:
        """Bytes of slabs that are taken, or given back with views of them still alive."""
        with self._lock:
            self._collect()
            return self._used_bytes

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that are resident: in use and kept for reuse."""

    @property
    def least_cut_bytes(self) -> int:
        """What the budget should at least be lowered by where it is lowered."""
        return 0

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` gives a slab of `nbytes`, if the machine has the memory."""
        return self.live_bytes + nbytes <= self.budget_bytes

    @spanned("take a slab")
    def take(self, nbytes: int) -> Slab:
        """Return a slab of exactly `nbytes`, a multiple of 4096; its contents are undefined.

        Raises PoolExhausted when it has no room, OSError (ENOMEM) when the machine has no memory
        for it.
        """
        if nbytes <= 0 or nbytes % PAGE_BYTES:
            raise ValueError(f"a slab has a multiple of {PAGE_BYTES} bytes, not {nbytes}")
        with self._lock:
            if not self.has_room(nbytes):
                raise PoolExhausted(nbytes, self._used_bytes, self.budget_bytes)
            slab = Slab(self._place(nbytes))
            self._used_bytes += nbytes
            self._live.add(slab)
            return slab

    def give(self, slab: Slab) -> None:
        """Take a slab back; it must not be used afterwards."""
        with self._lock:
            if slab not in self._live:
                raise ValueError("the slab does not belong to this pool, or was given back before")
            self._live.remove(slab)
            place = slab._place
            self._viewed[place] = weakref.ref(slab._array(), self._on_last_view(place))
            slab._view = None
            self._collect()

    @abstractmethod
    def join(self, nbytes: int, most_bytes: int) -> bool:
        """Make room where the bytes are free, but in pieces; return whether there is room."""

    def shrink(self, budget_bytes: int) -> None:
        """Lower the budget, and hold no more than it beside what is in use.

        Slabs that are taken stay; `take` refuses until enough of them are given back.
        """
        with self._lock:
            self.budget_bytes = min(self.budget_bytes, budget_bytes)
            self._collect()
            self._shrink()

    @abstractmethod
    def trim(self) -> None:
        """Give what is kept for reuse back to the system."""

    @abstractmethod
    def _place(self, nbytes: int) -> SlabMemory:
        """Return resident memory for a slab, for which there is room."""

    @abstractmethod
    def _free(self, place: SlabMemory) -> None:
        """Keep memory that is in use no more, for reuse."""

    @abstractmethod
    def _shrink(self) -> None:
        """Hold no more than the budget, as far as what is in use allows."""

    def _on_last_view(self, place: SlabMemory) -> Callable[[object], None]:
        return lambda _: self._unviewed.append(place)

    def _collect(self) -> None:
        """Make those given-back slabs free whose last view has gone."""
        if not self._unviewed:
            return
        while self._unviewed:
            place = self._unviewed.popleft()
            del self._viewed[place]
            self._used_bytes -= place.nbytes
            self._free(place)
        self._shrink()  # the budget may have become less meanwhile
