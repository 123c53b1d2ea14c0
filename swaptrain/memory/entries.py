"""The objects in memory, their I/O, and how room is made for more."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import FIRST_COMPLETED
from contextlib import contextmanager
from dataclasses import dataclass

from swaptrain.memory.backing import Backing, Wait
from swaptrain.memory.entry import (
    ABSENT,
    CLEAN,
    DIRTY,
    LEAVING,
    READING,
    SPARE,
    UNDER_WAY,
    WRITING,
    Entry,
)
from swaptrain.memory.slab import Pool
from swaptrain.program.instructions import ObjectKey
from swaptrain.program.residency import choose_victim
from swaptrain.spans import span

__all__ = ["Entries", "TierCounters"]

_MOMENTS, _MOMENT_S = 20, 0.005


@dataclass
class TierCounters:
    """What a step needed of the tier, cumulative."""

    wait_s: float = 0.0
    """Seconds in which the main thread waited for I/O."""
    needed_bytes: int = 0
    """Bytes of existing objects that instructions asked for."""
    missed_bytes: int = 0
    """Of those, bytes that were read from the disk for it, ahead of time or not."""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the seconds of a `with` block, on the main thread, as waiting for I/O."""
        begun = time.perf_counter()
        try:
            with span(what):
                yield
        finally:
            self.wait_s += time.perf_counter() - begun


class Entries(dict[ObjectKey, Entry]):
    """The objects in memory. Nothing goes that is pinned, being read or written, or dirty."""

    def __init__(
        self,
        pool: Pool,
        backing: Backing,
        wait: Wait,
        counters: TierCounters,
        let_go: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._pool, self._backing, self._wait = pool, backing, wait
        self._counters, self._let_go = counters, let_go
        self.whole_to = 0
        """Before this position nothing has to be read that is not here or on its way."""

    def start_write(self, key: ObjectKey) -> None:
        """Begin to spill an object, which is clean when that is done."""
        entry = self[key]
        with self._counters.waiting("wait for a place"):
            futures = self._backing.write(key, entry.slab)
        # After the backing took it: were it to raise, the object would still be dirty.
        entry.start("write", futures)

    def wait_for(self, entry: Entry) -> None:
        """Wait for an entry's reads or writes; raise their error."""
        if entry.content in UNDER_WAY:
            reading = entry.content is READING
            with self._counters.waiting("wait for a read" if reading else "wait for a write"):
                self._wait(entry.io)
            self._finish(entry)

    def reap(self) -> None:
        """Take note of finished I/O, and raise the first error."""
        for entry in [entry for entry in self.values() if entry.content in UNDER_WAY]:
            if entry.done:
                self._finish(entry)

    def _finish(self, entry: Entry) -> None:
        entry.finish()
        if entry.content is ABSENT:
            self._give_back(entry)

    def evict(self, key: ObjectKey) -> None:
        """Give up the copy in memory of an object that the disk has."""
        entry = self[key]
        entry.apply("evict")
        self._give_back(entry)

    def free(self, entry: Entry) -> None:
        """Give up an object that the program needs no more, in memory or on the disk.

        During I/O it keeps its slab, which a thread still fills or empties.
        """
        entry.apply("free")
        if entry.content is ABSENT:
            self._give_back(entry)
        elif entry.done:
            self._finish(entry)

    def _give_back(self, entry: Entry) -> None:
        del self[entry.key]
        self.whole_to = min(self.whole_to, entry.next_use)
        self._pool.give(entry.slab)

    def spare(self, *, dirty: bool = False) -> list[tuple[int, ObjectKey]]:
        """Return what the plan can spare and when it is used next, the furthest first."""
        content = DIRTY if dirty else CLEAN
        return sorted(
            (
                (entry.next_use, key)
                for key, entry in self.items()
                if entry.retention is SPARE and entry.content is content and not entry.pins
            ),
            reverse=True,
        )

    def spare_bytes(self, besides: Container[ObjectKey]) -> int:
        """Return the bytes of what is clean and the plan can spare, besides these objects."""
        return sum(self[key].slab.nbytes for _, key in self.spare() if key not in besides)

    def make_room(self, size_bytes: int, position: int) -> None:
        """Evict until `size_bytes` fit, waiting for writes where there is no other way."""
        while not self._has_room(size_bytes):
            self.reap()
            clean = self.spare()
            if clean:
                self.evict(clean[0][1])
                continue
            dirty = self.spare(dirty=True)
            if dirty:
                self.start_write(dirty[0][1])
            if self._wait_for_any(writes_only=True) or self._let_go():
                continue
            if not self._evict_unplanned(position):
                self._wait_for_views(size_bytes)
                return  # everything is pinned: the pool's own refusal says what is missing

    def make_room_at_once(
        self, size_bytes: int, later: int, spare: list[tuple[int, ObjectKey]]
    ) -> bool:
        """Evict of `spare` what is used after `later`; say whether `size_bytes` fit then."""
        missing = self._pool.live_bytes + size_bytes - self._pool.budget_bytes
        count = 0
        while missing > 0 and count < len(spare) and spare[count][0] > later:
            missing -= self[spare[count][1]].slab.nbytes
            count += 1
        if missing > 0:
            return False
        for _, key in spare[:count]:
            self.evict(key)
        del spare[:count]
        # What is free may lie in pieces; or a view that outlives its slab still takes room.
        while spare and spare[0][0] > later and not self._has_room(size_bytes):
            self.evict(spare.pop(0)[1])
        return self._has_room(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        """Say whether a slab fits, if need be where others are moved together."""
        return self._pool.has_room(size_bytes) or self._pool.join(size_bytes, 4 * size_bytes)

    def _wait_for_any(self, *, writes_only: bool = False) -> bool:
        """Wait until some I/O is done; say whether anything may have become movable."""
        wanted = (WRITING, LEAVING) if writes_only else UNDER_WAY
        under_way = [entry for entry in self.values() if entry.content in wanted]
        pending = [future for entry in under_way for future in entry.io if not future.done()]
        if not pending:
            self.reap()
            return bool(under_way)
        with self._counters.waiting("wait for room"):
            self._wait(pending, return_when=FIRST_COMPLETED)
        return True

    def _evict_unplanned(self, position: int) -> bool:
        """Evict what is used furthest in the future, or wait; say whether there was any.

        Where the plan left too little room: a view that outlives its slab, another program before.
        """
        movable = (CLEAN, DIRTY)
        victim = choose_victim(
            (
                (key, entry.next_use, entry.content is DIRTY)
                for key, entry in self.items()
                if entry.content in movable and not entry.pins
            ),
            position,
        )
        if victim is None:
            return self._wait_for_any()
        if self[victim].content is DIRTY:
            # It leaves in a later round, once it is clean: after its write succeeded.
            self.start_write(victim)
            self.wait_for(self[victim])
        else:
            self.evict(victim)
        return True

    def _wait_for_views(self, size_bytes: int) -> None:
        """Give threads whose reads and writes are done the moment to let go of their slabs."""
        with self._counters.waiting("wait for a view"):
            for _ in range(_MOMENTS):
                if self._pool.join(size_bytes, self._pool.budget_bytes):
                    return
                time.sleep(_MOMENT_S)
