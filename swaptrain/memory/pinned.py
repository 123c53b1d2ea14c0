"""A pool for a device with memory of its own: one region that its copies reach directly."""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from swaptrain.memory.mapping import PAGE_BYTES, Mapping
from swaptrain.memory.slab import Slab, SlabMemory, SlabPool

__all__ = ["PinCallback", "PinnedPool"]

PinCallback = Callable[[int, int], None]
"""Called with the address and the bytes of a mapping."""


class _Piece:
    """A part of a region."""

    def __init__(self, region: Mapping, start: int, nbytes: int) -> None:
        self.region = region
        self.start, self.nbytes = start, nbytes

    @property
    def address(self) -> int:
        return self.region.address + self.start

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def view(self) -> NDArray[np.uint8]:
        return self.region.view()[self.start : self.end]


class PinnedPool(SlabPool):
    """Slabs are pieces of one region, which is as large as the budget from the first slab on.

    To pin memory takes long, and to unpin it lets a device wait, so `pin` is called once, and
    `unpin` when the region goes or becomes smaller. Pinned pages cannot move to where they are
    missing: a slab takes the smallest hole that it fits in, neighbouring holes become one, and
    where there is none although the bytes are free, `join` moves slabs together.
    """

    def __init__(self, budget_bytes: int, pin: PinCallback, unpin: PinCallback) -> None:
        super().__init__(budget_bytes)
        self._pin, self._unpin = pin, unpin
        self._region: Mapping | None = None
        self._is_pinned = False
        self._holes: list[tuple[int, int]] = []
        """Of the region: where each begins and ends, in order."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are resident: the region's."""
        return self._region.nbytes if self._region is not None else 0

    @property
    def least_cut_bytes(self) -> int:
        """A sixty-fourth: to cut some off, all of it is unpinned and pinned again."""
        return self.budget_bytes // 64

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` gives a slab of `nbytes`: a hole of its own size is needed."""
        with self._lock:
            if not super().has_room(nbytes):
                return False
            return self._region is None or self._hole(nbytes) is not None

    def join(self, nbytes: int, most_bytes: int) -> bool:
        """Move up to `most_bytes` of slabs that nobody has a view of, to make a hole of `nbytes`.

        Return whether there is one.
        """
        with self._lock:
            if super().has_room(nbytes) and not self.has_room(nbytes):
                start, slabs = self._between(nbytes, most_bytes)
                for slab in slabs:
                    _move(slab, start)
                    start += slab.nbytes
                self._holes = self._gaps() if slabs else self._holes
            return self.has_room(nbytes)

    def _between(self, nbytes: int, most_bytes: int) -> tuple[int, list[Slab]]:
        """Return the slabs between holes that would do together, and where the first hole begins.

        Of all such neighbourhoods the one with the fewest bytes to move; nothing if there is none.
        """
        slabs: dict[SlabMemory, Slab] = {slab._place: slab for slab in self._live}
        pieces = self._pieces()
        found: tuple[int, list[Slab]] = 0, []
        window: deque[tuple[Slab, int]] = deque()  # slabs, and what is free in front of each
        free = moved = 0
        before = pieces[0].start if pieces else 0
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            after = (self.budget_bytes if last else pieces[index + 1].start) - piece.end
            slab = slabs.get(piece)
            if slab is None or _is_viewed(slab):
                window.clear()
                free = moved = 0
            else:
                window.append((slab, before))
                free, moved = free + before, moved + piece.nbytes
            while window and free + after >= nbytes:
                first, gap = window[0]
                if moved <= most_bytes:
                    found = _piece(first._place).start - gap, [slab for slab, _ in window]
                    most_bytes = moved - 1
                window.popleft()
                free, moved = free - gap, moved - first.nbytes
            before = after
        return found

    def _pieces(self) -> list[_Piece]:
        """Return what is in use, in order."""
        pieces = map(_piece, [*(slab._place for slab in self._live), *self._viewed])
        inside = [piece for piece in pieces if piece.region is self._region]
        return sorted(inside, key=lambda piece: piece.start)

    def _gaps(self) -> list[tuple[int, int]]:
        """Return where nothing is, in order."""
        gaps, end = [], 0
        for piece in self._pieces():
            if piece.start > end:
                gaps.append((end, piece.start))
            end = piece.end
        if self._region is not None and end < self._region.nbytes:
            gaps.append((end, self._region.nbytes))
        return gaps

    def trim(self) -> None:
        """Unpin and unmap the region once every slab is back; what is viewed stays mapped."""
        with self._lock:
            self._collect()
            region = self._region
            if region is None or self._live:
                return
            self._release(region)
            self._region = None
            if not self._viewed:
                region.close()  # else it goes with the last view

    def _place(self, nbytes: int) -> _Piece:
        if self._region is None:
            self._region = self._made(_pages(self.budget_bytes))
            self._holes = [(0, self._region.nbytes)]
        index = self._hole(nbytes)
        assert index is not None, "`take` asks for it"
        start, end = self._holes[index]
        self._holes[index : index + 1] = [(start + nbytes, end)] if start + nbytes < end else []
        return _Piece(self._region, start, nbytes)

    def _free(self, place: SlabMemory) -> None:
        start, end = _piece(place).start, _piece(place).end
        if _piece(place).region is not self._region:
            return  # it was viewed for longer than its region was there
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

    def _shrink(self) -> None:
        """Move what lies behind the budget, as far as it may be moved, and cut the end off."""
        region, nbytes = self._region, _pages(self.budget_bytes)
        if region is None or region.nbytes <= nbytes:
            return
        if self._end() > nbytes:
            self._pack()
        nbytes = max(nbytes, self._end())
        if nbytes < region.nbytes:
            self._release(region)
            region.shorten(nbytes)
            self._holes = self._gaps()
            self._hold(region)

    def _end(self) -> int:
        """Return where the last piece in use ends."""
        pieces = self._pieces()
        return pieces[-1].end if pieces else 0

    def _pack(self) -> None:
        """Move every slab that nobody has a view of as far down as it goes."""
        slabs: dict[SlabMemory, Slab] = {slab._place: slab for slab in self._live}
        end = 0
        for piece in self._pieces():
            slab = slabs.get(piece)
            if slab is not None and piece.start > end and not _is_viewed(slab):
                _move(slab, end)
            end = piece.end
        self._holes = self._gaps()

    def _made(self, nbytes: int) -> Mapping:
        region = Mapping(nbytes)
        try:
            region.populate()
            region.keep_from_children()
            self._hold(region)
        except BaseException:
            region.close()
            raise
        return region

    def _hold(self, region: Mapping) -> None:
        self._pin(region.address, region.nbytes)
        self._is_pinned = True

    def _release(self, region: Mapping) -> None:
        if self._is_pinned:
            self._is_pinned = False
            self._unpin(region.address, region.nbytes)


def _pages(nbytes: int) -> int:
    """Return as many of the bytes as are whole pages."""
    return nbytes // PAGE_BYTES * PAGE_BYTES


def _piece(place: SlabMemory) -> _Piece:
    assert isinstance(place, _Piece), "`_place` gives these"
    return place


def _is_viewed(slab: Slab) -> bool:
    """Whether anything refers to a slab's bytes: a tensor, or what is being read or written."""
    return sys.getrefcount(slab._view) > 2  # the slab's own, and that of the call


def _move(slab: Slab, start: int) -> None:
    """Move a slab of which there are no views to another place in its region."""
    piece = _piece(slab._place)
    slab._view = None
    ctypes.memmove(piece.address - piece.start + start, piece.address, piece.nbytes)
    piece.start = start
    slab._view = piece.view()
