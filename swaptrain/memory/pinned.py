"""A pool for a device with memory of its own: one region that its copies reach directly."""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from swaptrain.memory.mapping import PAGE_BYTES, Mapping
from swaptrain.memory.slab import Place, Slab, SlabPool

__all__ = ["PinCallback", "PinnedPool"]

PinCallback = Callable[[int, int], None]
"""Called with the address and the bytes of a mapping."""


class _Piece:
    """A part of a region."""

    def __init__(self, region: Mapping, start: int, nbytes: int) -> None:
        self._region = region
        self.start, self.nbytes = start, nbytes

    @property
    def address(self) -> int:
        return self._region.address + self.start

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def view(self) -> NDArray[np.uint8]:
        return self._region.view()[self.start : self.end]


class PinnedPool(SlabPool):
    """Slabs are pieces of one region, which is as large as the budget from the first slab on.

    To pin memory takes long, and to unpin it lets a device wait, so `pin` is called once, and
    `unpin` when the region goes or becomes smaller. Pinned pages cannot move to where they are
    missing: a slab takes the smallest hole that it fits in, neighbouring holes become one, and
    where there is none although the bytes are free, `join` moves what is in use together.
    """

    def __init__(self, budget_bytes: int, pin: PinCallback, unpin: PinCallback) -> None:
        super().__init__(budget_bytes)
        self._pin, self._unpin = pin, unpin
        self._region: Mapping | None = None
        self._holes: list[tuple[int, int]] = []
        """Where each begins and ends, in order."""
        self._reset()

    @property
    def held_bytes(self) -> int:
        """Bytes that are resident: the region's."""
        return self._region.nbytes if self._region is not None else 0

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` gives a slab of `nbytes`: a hole of its own size is needed."""
        with self._lock:
            return super().has_room(nbytes) and self._hole(nbytes) is not None

    def join(self) -> None:
        """Move the slabs that nobody has a view of together; nobody may be using one."""
        with self._lock:
            self._collect()
            if self._region is None:
                return
            slabs: dict[Place, Slab] = {slab._place: slab for slab in self._live}
            end, holes = 0, []
            for piece in sorted(map(_piece, [*slabs, *self._viewed]), key=lambda at: at.start):
                if piece in slabs and piece.start > end:
                    _move(slabs[piece], piece, end)
                if piece.start > end:
                    holes.append((end, piece.start))
                end = piece.end
            rest = [(end, self._region.nbytes)] if end < self._region.nbytes else []
            self._holes = holes + rest

    def trim(self) -> None:
        """Unpin and unmap the region, if nothing lies in it."""
        with self._lock:
            self._collect()
            if self._region is not None and not self._used_bytes:
                self._unpin(self._region.address, self._region.nbytes)
                self._region.close()
                self._reset()

    def _place(self, nbytes: int) -> _Piece:
        if self._region is None:
            self._region = self._pinned(self.budget_bytes // PAGE_BYTES * PAGE_BYTES)
        index = self._hole(nbytes)
        assert index is not None, "`take` asks for it"
        start, end = self._holes[index]
        self._holes[index : index + 1] = [(start + nbytes, end)] if start + nbytes < end else []
        return _Piece(self._region, start, nbytes)

    def _free(self, place: Place) -> None:
        start, end = _piece(place).start, _piece(place).end
        index = bisect(self._holes, (start, end))
        if index < len(self._holes) and self._holes[index][0] == end:
            end = self._holes.pop(index)[1]
        if index and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, end))

    def _hole(self, nbytes: int) -> int | None:
        """Return the index of the smallest hole for `nbytes` that begins first, within the budget.

        What lies behind the budget, which has become less, is not used again.
        """
        sizes = [min(end, self.budget_bytes) - start for start, end in self._holes]
        fitting = [(size, index) for index, size in enumerate(sizes) if size >= nbytes]
        return min(fitting)[1] if fitting else None

    def _settle(self) -> None:
        """Cut off what is behind the budget, when nothing is left there."""
        region, nbytes = self._region, self.budget_bytes // PAGE_BYTES * PAGE_BYTES
        if region is None or region.nbytes <= nbytes or not self._holes:
            return
        start, end = self._holes[-1]
        if end < region.nbytes or start > nbytes:
            return
        self._unpin(region.address, region.nbytes)
        region.shorten(nbytes)
        self._pin(region.address, region.nbytes)
        self._holes[-1:] = [(start, nbytes)] if start < nbytes else []

    def _pinned(self, nbytes: int) -> Mapping:
        region = Mapping(nbytes)
        try:
            region.populate()
            region.keep_from_children()
            self._pin(region.address, nbytes)
        except BaseException:
            region.close()
            raise
        return region

    def _reset(self) -> None:
        self._region = None
        self._holes = [(0, self.budget_bytes // PAGE_BYTES * PAGE_BYTES)]


def _piece(place: Place) -> _Piece:
    assert isinstance(place, _Piece), "`_place` gives these"
    return place


def _move(slab: Slab, piece: _Piece, start: int) -> None:
    """Move a slab down in its region; it stays where it is if a view of it is alive."""
    alive = weakref.ref(slab._array())
    slab._view = None
    if alive() is None:
        ctypes.memmove(piece.address - piece.start + start, piece.address, piece.nbytes)
        piece.start = start
    slab._view = alive() if alive() is not None else piece.view()
