"""A pool for computing on the processor: pages go from slabs of one size to those of another."""

from __future__ import annotations

from swaptrain.memory.limits import address_space_bytes
from swaptrain.memory.mapping import Mapping
from swaptrain.memory.slab import SlabMemory, SlabPool
from swaptrain.spans import span

__all__ = ["PagePool"]

_MOST_SHELLS = 256
"""Mappings without pages that are kept, since to map and to unmap takes time as well; none where
addresses are limited (ulimit -v)."""


class PagePool(SlabPool):
    """Each slab is a mapping of its own, and what is free waits for a slab of exactly its size.

    When another size needs the room, pages of the longest unused ones become the new slab's, so
    that the kernel need not zero them again. So it is never full of holes.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._unused: dict[Mapping, None] = {}  # the longest unused first
        self._shells: dict[Mapping, None] = {}  # free and without pages
        self._most_shells = _MOST_SHELLS if address_space_bytes() is None else 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are resident: in use and kept for reuse."""
        with self._lock:
            return self.live_bytes + self._unused_bytes()

    def join(self, nbytes: int, most_bytes: int) -> bool:
        """Do nothing: pages go to where they are missing."""
        return self.has_room(nbytes)

    def trim(self) -> None:
        """Unmap everything that is kept for reuse."""
        with self._lock:
            self._collect()
            self._release(0)
            self._drop_shells(0)

    def _place(self, nbytes: int) -> Mapping:
        """Return a resident mapping: one that is free, or a new one.

        Nothing is made resident before what it takes the place of is given back, so at no time is
        more resident than the budget. Raises OSError (ENOMEM).
        """
        mapping = self._unused_of(nbytes) or self._mapping(nbytes)
        self._unused.pop(mapping, None)
        self._shells.pop(mapping, None)
        if mapping.is_resident:
            return mapping
        keep_bytes = self.budget_bytes - self._used_bytes - nbytes
        try:
            with span("move pages"):
                self._move_pages(mapping, keep_bytes)
            with span("give pages back"):
                self._release(keep_bytes)
            with span("zero pages", nbytes=mapping.nbytes - mapping.resident_bytes):
                mapping.populate()
        except BaseException:
            mapping.close()
            raise
        return mapping

    def _free(self, place: SlabMemory) -> None:
        assert isinstance(place, Mapping), "`_place` gives these"
        self._unused[place] = None

    def _shrink(self) -> None:
        self._release(max(0, self.budget_bytes - self._used_bytes))

    def _unused_bytes(self) -> int:
        return sum(mapping.resident_bytes for mapping in self._unused)

    def _release(self, keep_bytes: int) -> None:
        """Give pages of free mappings back until at most `keep_bytes` of them remain."""
        excess_bytes = self._unused_bytes() - keep_bytes
        for mapping in self._donors() if excess_bytes > 0 else ():
            had_bytes = mapping.resident_bytes
            mapping.drop_pages(excess_bytes)
            excess_bytes -= had_bytes - mapping.resident_bytes
            self._put_aside(mapping)
            if excess_bytes <= 0:
                return

    def _donors(self) -> list[Mapping]:
        """Return what is free: first what has lost pages already, then the longest unused."""
        return sorted(self._unused, key=lambda mapping: mapping.is_resident)

    def _put_aside(self, mapping: Mapping) -> None:
        """Take note that a free mapping has lost pages."""
        if not mapping.resident_bytes:
            del self._unused[mapping]
            self._shells[mapping] = None
            self._drop_shells(self._most_shells)

    def _drop_shells(self, most: int) -> None:
        while len(self._shells) > most:
            mapping = next(iter(self._shells))
            del self._shells[mapping]
            mapping.close()

    def _unused_of(self, nbytes: int) -> Mapping | None:
        """Return the mapping of this size, of those not in use, that has most of its pages."""
        fitting = [mapping for mapping in reversed(self._unused) if mapping.nbytes == nbytes]
        if fitting:
            return max(fitting, key=lambda mapping: mapping.resident_bytes)
        return next((mapping for mapping in self._shells if mapping.nbytes == nbytes), None)

    def _move_pages(self, mapping: Mapping, keep_bytes: int) -> None:
        """Take what a mapping lacks from free ones; from whole ones only where one has to go."""
        full = self._unused_bytes() > keep_bytes
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
