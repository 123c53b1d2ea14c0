"""The RAM tier: objects in slabs under one budget, fetched ahead and evicted by the program.

All decisions are made on the main thread; I/O threads only fill and empty slabs. `memory.entry` has
the states of an object in memory and their transitions.

Invariants: slabs held never exceed the pool's budget; a dirty object leaves memory only after its
write succeeded; the program touches no slab that is being read, and changes none that is being
written.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, wait
from itertools import chain
from typing import Any

from swaptrain.memory.backing import Backing, Wait
from swaptrain.memory.entries import Entries, TierCounters
from swaptrain.memory.entry import (
    CLEAN,
    LEAVING,
    PREFETCHED,
    READING,
    SPARE,
    WANTED,
    WRITING,
    Entry,
)
from swaptrain.memory.slab import Pool, Slab
from swaptrain.program.durability import Durability
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Program
from swaptrain.program.residency import (
    NextUse,
    Residency,
    plan_residency,
    planned_bytes,
)
from swaptrain.spans import mark, spanned

__all__ = ["Tier"]


class Tier:
    """Keeps objects in memory for a program, within the budget of `pool`."""

    def __init__(
        self,
        pool: Pool,
        backing: Backing,
        wait: Wait = wait,
        *,
        let_go: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take the memory and the disk; `wait` is given only where time is imagined.

        `let_go` has a device end its copies and says whether it held slabs for them.
        """
        self._pool, self._backing = pool, backing
        self._plan = Residency(NextUse(()))
        self.counters = TierCounters()
        self._entries = Entries(pool, backing, wait, self.counters, let_go)

    @spanned("plan memory")
    def follow(
        self,
        program: Program,
        following: Program = (),
        durability: Durability | None = None,
    ) -> None:
        """Take `program` as what runs from now on, and plan what memory holds when.

        `following` is what comes after it; `durability` names the objects that an instruction makes
        durable, which are clean afterwards, and the positions at which they are written (None:
        nothing is). A part of the budget is left out of the plan: what is fetched ahead lies there.
        """
        self._plan = plan_residency(
            program,
            following,
            self._backing.size_bytes,
            planned_bytes(program, self._backing.size_bytes, self._pool.budget_bytes),
            durability=durability or Durability(program, following, unit="nothing"),
            held=self._plan.held_after,
        )
        self._entries.whole_to = 0
        for key, entry in self._entries.items():
            first = self._plan.next_use.after(key, -1)
            planned = first < len(self._plan.reads) and key in self._plan.reads[first]
            ahead = planned and entry.retention is PREFETCHED
            self._foresee(entry, -1, ahead=ahead)

    @spanned("bring")
    def acquire(self, instruction: Instruction, position: int) -> dict[ObjectKey, Slab]:
        """Bring what `instruction` touches into memory and pin it; return the slabs.

        Waits for reads that are still under way. What it writes fresh gets slabs with undefined
        content.
        """
        keys = list(dict.fromkeys(instruction.touches))
        # All that is here is pinned before anything is brought, so that making room for one object
        # of the instruction never evicts another.
        for key in keys:
            if key in self._entries and self._entries[key].content is not LEAVING:
                self._entries[key].pins += 1
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.content is LEAVING:
                # The I/O of its last life still uses the slab, and on the disk its place.
                self._entries.wait_for(entry)
                entry = None
            if entry is None:
                entry = self._bring(key, position, fresh=key in instruction.writes)
                # What another rank has sent has no place on this disk: it stays until it is freed.
                entry.pins += 2 if key.kind is Kind.SHARED else 1
        changed = {*instruction.changes, *instruction.writes}
        self._wait_for_content(keys, changed)
        for key in instruction.needs:
            self._need(key)
        for key in changed:
            self._entries[key].apply("change")
        for key in keys:
            self._foresee(self._entries[key], position)
        return {key: self._entries[key].slab for key in keys}

    def _need(self, key: ObjectKey) -> None:
        """Count an object that an instruction asks for; a trace says which state was used when."""
        nbytes = self._entries[key].slab.nbytes
        self.counters.needed_bytes += nbytes
        if key.kind is Kind.STATE:
            mark("need", key, nbytes)

    def _wait_for_content(self, keys: Iterable[ObjectKey], changed: Container[ObjectKey]) -> None:
        """Wait for the reads of objects that are needed, and the writes of those that change."""
        for key in keys:
            entry = self._entries[key]
            # A reader goes on during a write. Whoever changes the object waits: a commit would
            # write bytes of two versions, and its record would have their checksum.
            if entry.content is READING or key in changed:
                self._entries.wait_for(entry)

    @spanned("release")
    def release(self, instruction: Instruction) -> None:
        """Unpin what `instruction` touched and forget what it used for the last time."""
        for key in dict.fromkeys(instruction.touches):
            self._entries[key].pins -= 1
        for key in instruction.frees:
            self.free(key)

    def free(self, key: ObjectKey) -> None:
        """Let go of an object that the program needs no more, in memory and on the disk."""
        self._backing.forget(key)
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.free(entry)

    def in_memory(self, key: ObjectKey) -> Slab:
        """Return the slab of an object that was written here and never left memory."""
        return self._entries[key].slab

    def ready(self, key: ObjectKey) -> Slab | None:
        """Return the slab of an object that is in memory whole, else None."""
        entry = self._entries.get(key)
        if entry is None or entry.content in (READING, LEAVING):
            return None
        return entry.slab

    def saving(self, keys: Iterable[ObjectKey], *done: Future[Any]) -> None:
        """Say that a commit is writing these objects as they are now, until all of `done` are."""
        for key in keys:
            self._entries[key].start("write", done)

    def has_room_beside(self, first: Instruction, second: Instruction) -> bool:
        """Whether what the second touches finds room while the first has all that is its own.

        Of slabs that are free or that the plan can spare, and no more than half of all for both, so
        that what is free can be put together.
        """
        size_bytes, entries, touched = self._backing.size_bytes, self._entries, set(second.touches)
        both = sum(size_bytes(key) for key in touched.union(first.touches))
        missing = sum(size_bytes(key) for key in touched if key not in entries)
        free = self._pool.budget_bytes - self._pool.live_bytes + entries.spare_bytes(touched)
        return 2 * both <= self._pool.budget_bytes and missing <= free

    def has_room_for(self, keys: Iterable[ObjectKey]) -> bool:
        """Whether these objects, none of which is here, find room and nothing has to leave."""
        if any(key in self._entries for key in keys):
            return False
        sizes = sum(self._backing.size_bytes(key) for key in keys)
        return self._pool.live_bytes + sizes <= self._pool.budget_bytes

    def size_bytes(self, key: ObjectKey) -> int:
        """Return the bytes of an object's slab."""
        return self._backing.size_bytes(key)

    def planned_room(self, first: int, last: int) -> int:
        """Return the bytes that the plan has no use for from position `first` up to `last`."""
        used = self._plan.used_bytes[first:last]
        return self._pool.budget_bytes - max(used, default=0)

    def resident(self) -> list[ObjectKey]:
        """Return the objects that are in memory."""
        return [key for key, entry in self._entries.items() if entry.content is not LEAVING]

    @spanned("give way")
    def give_way(self, position: int) -> None:
        """Evict until the pool's budget, which was lowered, holds what is left beside `position`.

        What that instruction touches stays.
        """
        self._entries.make_room(0, position)

    @spanned("read ahead")
    def prefetch(self, position: int) -> None:
        """Begin to read what the following instructions need, as far as the plan gives room.

        Clean objects that the plan can spare give way at once; nothing waits.
        """
        self._entries.reap()
        first = self._first_missing(position)
        if first == len(self._plan.touches):
            return
        reading = (e for e in self._entries.values() if e.content is READING)
        in_flight_bytes = sum(entry.slab.nbytes for entry in reading)
        budget, plan, size_bytes = self._pool.budget_bytes, self._plan, self._backing.size_bytes
        # What is fetched ahead must fit beside what the plan holds at every position before it.
        # Up to the first that misses something, only those count that the plan reads for.
        ahead, room, before, spare = 0, budget, position, self._entries.spare()
        for later in chain(plan.reading(position + 1, first), range(first, len(plan.touches))):
            room = min(room, budget - max(plan.used_bytes[before:later]) + ahead)
            before, reads = later, plan.reads[later]
            ahead += sum(size_bytes(key) for key in reads if key in self._entries)
            for key in self._missing(later) if later >= first else ():
                size = size_bytes(key)
                if in_flight_bytes > budget // 2 or (key in reads and room - ahead < size):
                    return
                if not self._entries.make_room_at_once(size, later, spare):
                    return
                self._start_read(key, position, ahead=key in reads)
                in_flight_bytes += size
                ahead += size if key in reads else 0
            if ahead > budget:
                return

    def _missing(self, position: int) -> list[ObjectKey]:
        """Return what the instruction at `position` needs and only the disk has."""
        writes = self._plan.instructions[position].writes
        return [
            key
            for key in self._plan.touches[position]
            if key not in self._entries and key not in writes and self._backing.holds(key)
        ]

    def _first_missing(self, position: int) -> int:
        """Return the first position after `position` that something is missing for, or the end."""
        end = len(self._plan.touches)
        self._entries.whole_to = max(self._entries.whole_to, position + 1)
        while self._entries.whole_to < end and not self._missing(self._entries.whole_to):
            self._entries.whole_to += 1
        return self._entries.whole_to

    @spanned("write behind")
    def write_behind(self, position: int) -> None:
        """Begin to spill the dirty objects that the plan evicts before their next use."""
        self._entries.reap()
        writing = (e for e in self._entries.values() if e.content in (WRITING, LEAVING))
        in_flight_bytes = sum(entry.slab.nbytes for entry in writing)
        for _, key in self._entries.spare(dirty=True):
            if in_flight_bytes > self._pool.budget_bytes // 4:
                return
            self._entries.start_write(key)
            in_flight_bytes += self._entries[key].slab.nbytes

    def drain(self) -> None:
        """Wait until nothing is read or written; raise the first error met."""
        for entry in list(self._entries.values()):
            self._entries.wait_for(entry)
        self._entries.reap()

    def empty(self) -> None:
        """Give up the copies in memory of all that the disk has."""
        self.drain()
        for key in [key for key, entry in self._entries.items() if entry.content is CLEAN]:
            self._entries.evict(key)

    def close(self) -> None:
        """Give every slab back; what is dirty is lost, and the tier is of no use afterwards."""
        for entry in self._entries.values():
            self._pool.give(entry.slab)
        self._entries.clear()

    def _bring(self, key: ObjectKey, position: int, *, fresh: bool) -> Entry:
        self._entries.make_room(self._backing.size_bytes(key), position)
        if not fresh:
            return self._start_read(key, position)
        entry = self._entries[key] = Entry(key, self._pool.take(self._backing.size_bytes(key)))
        entry.apply("make")
        return entry

    def _start_read(self, key: ObjectKey, position: int, *, ahead: bool = False) -> Entry:
        slab = self._pool.take(self._backing.size_bytes(key))
        self.counters.missed_bytes += slab.nbytes
        mark("ask for", key, slab.nbytes)
        entry = self._entries[key] = Entry(key, slab)
        # Were the read to raise, the object would still be absent, not clean with other bytes.
        entry.start("read", self._backing.read(key, slab))
        self._foresee(entry, position, ahead=ahead)
        return entry

    def _foresee(self, entry: Entry, position: int, *, ahead: bool = False) -> None:
        """Note the plan's next use of an object after `position`, and whether it stays until then.

        `ahead`: it was read ahead for that use, as planned.
        """
        entry.next_use = self._plan.next_use.after(entry.key, position)
        if ahead:
            entry.retention = PREFETCHED
        elif self._plan.spares(entry.key, position):
            entry.retention = SPARE
        else:
            entry.retention = WANTED
