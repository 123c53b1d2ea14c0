"""The RAM tier: objects in slabs under one budget, fetched ahead and evicted by the program.

All decisions are made on the main thread; I/O threads only fill and empty slabs. An object is in
one of these states:

    absent -> reading -> clean -> (changed) dirty -> saving -> clean -> absent
    fresh: written for the first time, dirty from birth

Invariants: slabs held never exceed the pool's budget; a dirty object leaves memory only after its
write succeeded; an object whose slab is being read or written is not touched by the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from swaptrain.memory.home import Home, Wait
from swaptrain.memory.slab import Pool, Slab
from swaptrain.program.instructions import Instruction, ObjectKey, Program
from swaptrain.program.residency import (
    NextUse,
    Residency,
    choose_victim,
    plan_residency,
    planned_bytes,
)

__all__ = ["Tier", "TierCounters"]

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


@dataclass
class _Entry:
    slab: Slab
    dirty: bool = False
    pins: int = 0
    next_use: int = 0
    """The position where the program touches it next."""
    ahead: bool = False
    """It was read for that, as planned."""
    spare: bool = False
    """The plan does not keep it until then."""
    busy: list[Future[Any]] = field(default_factory=list)
    saving: bool = False
    """The busy futures write a snapshot of the slab; the object is clean when they are done."""
    dead: bool = False
    """Freed by the program while busy: goes when the futures are done."""


class Tier:
    """Keeps objects in memory for a program, within the budget of `pool`."""

    def __init__(self, pool: Pool, home: Home, wait: Wait = wait) -> None:
        """Take the memory and the disk; `wait` is given only where time is imagined."""
        self._pool = pool
        self._home = home
        self._wait = wait
        self._entries: dict[ObjectKey, _Entry] = {}
        self._plan = Residency(NextUse(()))
        self._reads_in_flight: dict[ObjectKey, int] = {}
        self._whole_to = 0
        """Before this position nothing has to be read that is not in memory or on its way."""
        self.counters = TierCounters()

    def follow(
        self,
        program: Program,
        following: Program = (),
        durable: Callable[[Instruction], Iterable[ObjectKey]] = lambda _: (),
        *,
        repeats: int = 1,
    ) -> None:
        """Take `program` as what runs from now on, and plan what memory holds when.

        `following` is what comes after it; `durable` names what an instruction makes durable, so
        that it is clean afterwards; it is written until a position that settles (`settling`, with
        `repeats`). A part of the budget is left out of the plan: what is fetched ahead lies there.
        """
        self._plan = plan_residency(
            program,
            following,
            self._home.size_bytes,
            planned_bytes(program, self._home.size_bytes, self._pool.budget_bytes),
            durable=durable,
            held=self._plan.held_after,
            repeats=repeats,
        )
        self._whole_to = 0
        for key, entry in self._entries.items():
            first = self._plan.next_use.after(key, -1)
            entry.ahead &= first < len(self._plan.reads) and key in self._plan.reads[first]
            self._foresee(key, entry, -1)

    def acquire(self, instruction: Instruction, position: int) -> dict[ObjectKey, Slab]:
        """Bring what `instruction` touches into memory and pin it; return the slabs.

        Waits for reads that are still under way. What it writes fresh gets slabs with undefined
        content.
        """
        keys = list(dict.fromkeys(instruction.touches))
        for key in keys:
            if key in self._entries and not self._entries[key].dead:
                self._entries[key].pins += 1
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.dead:
                self._settle(entry)
                self._drop(key)
                entry = None
            if entry is None:
                entry = self._bring(key, position, fresh=key in instruction.writes)
                entry.pins += 1
        changed = set(instruction.changes)
        for key in keys:
            entry = self._entries[key]
            if entry.saving and key not in changed:
                continue  # its content stays as it is while it is written
            self._settle(entry)
        for key in instruction.needs:
            self.counters.needed_bytes += self._entries[key].slab.nbytes
        for key in (*instruction.changes, *instruction.writes):
            self._entries[key].dirty = True
        for key in keys:
            self._entries[key].ahead = False
            self._foresee(key, self._entries[key], position)
        return {key: self._entries[key].slab for key in keys}

    def release(self, instruction: Instruction) -> None:
        """Unpin what `instruction` touched and forget what it used for the last time."""
        for key in dict.fromkeys(instruction.touches):
            self._entries[key].pins -= 1
        for key in instruction.frees:
            self.free(key)

    def free(self, key: ObjectKey) -> None:
        """Drop a dead object, from memory and from the disk's view."""
        self._home.forget(key)
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.busy and not all(future.done() for future in entry.busy):
            entry.dead = True
            return
        self._settle(entry)
        self._drop(key)

    def in_memory(self, key: ObjectKey) -> Slab:
        """Return the slab of an object that was written here and never left memory."""
        return self._entries[key].slab

    def ready(self, key: ObjectKey) -> Slab | None:
        """Return the slab of an object that is in memory whole, else None."""
        entry = self._entries.get(key)
        if entry is None or entry.dead or (entry.busy and not entry.saving):
            return None
        return entry.slab

    def saving(self, keys: Iterable[ObjectKey], *done: Future[Any]) -> None:
        """Say that a commit is writing these objects as they are now, until all of `done` are."""
        for key in keys:
            entry = self._entries[key]
            entry.busy.extend(done)
            entry.saving = True
            entry.dirty = False

    def resident(self) -> list[ObjectKey]:
        """Return the objects that are in memory."""
        return [key for key, entry in self._entries.items() if not entry.dead]

    def prefetch(self, position: int) -> None:
        """Begin to read what the following instructions need, as far as the plan gives room.

        Clean objects that the plan can spare give way at once; nothing waits.
        """
        self._reap()
        first = self._first_missing(position)
        if first == len(self._plan.touches):
            return
        self._reads_in_flight = {k: n for k, n in self._reads_in_flight.items() if self._reading(k)}
        in_flight_bytes = sum(self._reads_in_flight.values())
        budget, plan, size_bytes = self._pool.budget_bytes, self._plan, self._home.size_bytes
        # What is fetched ahead must fit beside what the plan holds at every position before it.
        ahead, room, spare = 0, budget, self._spare()
        for later in range(position + 1, len(plan.touches)):
            room = min(room, budget - plan.used_bytes[later - 1] + ahead)
            reads = plan.reads[later]
            ahead += sum(size_bytes(key) for key in reads if key in self._entries)
            for key in self._missing(later) if later >= first else ():
                size = size_bytes(key)
                if in_flight_bytes > budget // 2 or (key in reads and room - ahead < size):
                    return
                if not self._room_without_waiting(size, later, spare):
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
            if key not in self._entries and key not in writes and self._home.holds(key)
        ]

    def _first_missing(self, position: int) -> int:
        """Return the first position behind `position` that something is missing for, or the end."""
        end = len(self._plan.touches)
        self._whole_to = max(self._whole_to, position + 1)
        while self._whole_to < end and not self._missing(self._whole_to):
            self._whole_to += 1
        return self._whole_to

    def write_behind(self, position: int) -> None:
        """Begin to spill the dirty objects that the plan evicts before their next use."""
        self._reap()
        writing = sum(e.slab.nbytes for e in self._entries.values() if e.busy and e.saving)
        for _, key in self._spare(dirty=True):
            if writing > self._pool.budget_bytes // 4:
                return
            entry = self._entries[key]
            self._start_write(key, entry)
            writing += entry.slab.nbytes

    def drain(self) -> None:
        """Wait until nothing is read or written; raise the first error met."""
        for entry in list(self._entries.values()):
            self._settle(entry)
        self._reap()

    def close(self) -> None:
        """Give every slab back; what is dirty is lost, and the tier is of no use afterwards."""
        for entry in self._entries.values():
            self._pool.give(entry.slab)
        self._entries.clear()

    def _bring(self, key: ObjectKey, position: int, *, fresh: bool) -> _Entry:
        self._make_room(self._home.size_bytes(key), position)
        if fresh:
            entry = self._entries[key] = _Entry(self._pool.take(self._home.size_bytes(key)))
            return entry
        return self._start_read(key, position)

    def _start_read(self, key: ObjectKey, position: int, *, ahead: bool = False) -> _Entry:
        slab = self._pool.take(self._home.size_bytes(key))
        self.counters.missed_bytes += slab.nbytes
        entry = self._entries[key] = _Entry(slab, ahead=ahead)
        entry.busy = list(self._home.read(key, slab))
        self._reads_in_flight[key] = slab.nbytes
        self._foresee(key, entry, position)
        return entry

    def _foresee(self, key: ObjectKey, entry: _Entry, position: int) -> None:
        """Take note of what the plan has in store for an object behind `position`."""
        entry.next_use = self._plan.next_use.after(key, position)
        entry.spare = not entry.ahead and self._plan.spares(key, position)

    def _start_write(self, key: ObjectKey, entry: _Entry) -> None:
        begun = time.perf_counter()
        entry.busy = list(self._home.write(key, entry.slab))
        self.counters.wait_s += time.perf_counter() - begun
        entry.saving = True
        entry.dirty = False

    def _make_room(self, size_bytes: int, position: int) -> None:
        """Evict until `size_bytes` fit, waiting for writes where there is no other way."""
        while not self._has_room(size_bytes):
            self._reap()
            clean = self._spare()
            if clean:
                self._drop(clean[0][1])
                continue
            dirty = self._spare(dirty=True)
            if dirty:
                self._start_write(dirty[0][1], self._entries[dirty[0][1]])
            if not self._wait_for_any(writes_only=True) and not self._evict_unplanned(position):
                self._wait_for_views(size_bytes)
                return  # everything is pinned: the pool's own refusal says what is missing

    def _wait_for_views(self, size_bytes: int) -> None:
        """Give threads whose reads and writes are done the moment to let go of their slabs."""
        for _ in range(_MOMENTS):
            if self._pool.join(size_bytes, self._pool.budget_bytes):
                return
            time.sleep(_MOMENT_S)

    def _has_room(self, size_bytes: int) -> bool:
        """Say whether a slab fits, if need be where others are moved together."""
        return self._pool.has_room(size_bytes) or self._pool.join(size_bytes, 4 * size_bytes)

    def _evict_unplanned(self, position: int) -> bool:
        """Evict what is used furthest in the future, or wait; say whether there was any.

        Where the plan left too little room: a view that outlives its slab, another program before.
        """
        movable = {k: e for k, e in self._entries.items() if e.pins == 0 and not e.busy}
        victim = choose_victim(
            ((key, entry.dirty) for key, entry in movable.items()), self._plan.next_use, position
        )
        if victim is None:
            return self._wait_for_any()
        if movable[victim].dirty:
            self._start_write(victim, movable[victim])
            self._settle(movable[victim])
        else:
            self._drop(victim)
        return True

    def _spare(self, *, dirty: bool = False) -> list[tuple[int, ObjectKey]]:
        """Return what the plan can spare and when it is used next, the furthest first."""
        return sorted(
            (
                (entry.next_use, key)
                for key, entry in self._entries.items()
                if entry.spare and entry.dirty == dirty and not entry.pins and not entry.busy
            ),
            reverse=True,
        )

    def _room_without_waiting(
        self, size_bytes: int, later: int, spare: list[tuple[int, ObjectKey]]
    ) -> bool:
        """Evict of `spare` what is used after `later`; say whether `size_bytes` fit then."""
        missing = self._pool.live_bytes + size_bytes - self._pool.budget_bytes
        count = 0
        while missing > 0 and count < len(spare) and spare[count][0] > later:
            missing -= self._entries[spare[count][1]].slab.nbytes
            count += 1
        if missing > 0:
            return False
        for _, key in spare[:count]:
            self._drop(key)
        del spare[:count]
        # What is free may lie in pieces; or a view that outlives its slab still takes room.
        while spare and spare[0][0] > later and not self._has_room(size_bytes):
            self._drop(spare.pop(0)[1])
        return self._has_room(size_bytes)

    def _wait_for_any(self, *, writes_only: bool = False) -> bool:
        """Wait until some I/O is done; say whether anything may have become movable."""
        busy = [e for e in self._entries.values() if e.busy and (e.saving or not writes_only)]
        pending = [f for entry in busy for f in entry.busy if not f.done()]
        if not pending:
            self._reap()
            return bool(busy)
        begun = time.perf_counter()
        self._wait(pending, return_when=FIRST_COMPLETED)
        self.counters.wait_s += time.perf_counter() - begun
        return True

    def _settle(self, entry: _Entry) -> None:
        """Wait for an entry's reads or writes; raise their error."""
        if entry.busy:
            begun = time.perf_counter()
            self._wait(entry.busy)
            self.counters.wait_s += time.perf_counter() - begun
            for future in entry.busy:
                future.result()
            entry.busy, entry.saving = [], False

    def _reading(self, key: ObjectKey) -> bool:
        entry = self._entries.get(key)
        return entry is not None and bool(entry.busy) and not entry.saving

    def _reap(self) -> None:
        """Take note of finished I/O; drop what died meanwhile; raise the first error."""
        for key, entry in list(self._entries.items()):
            if entry.busy and all(future.done() for future in entry.busy):
                for future in entry.busy:
                    future.result()
                entry.busy, entry.saving = [], False
            if entry.dead and not entry.busy:
                self._drop(key)

    def _drop(self, key: ObjectKey) -> None:
        entry = self._entries.pop(key)
        self._whole_to = min(self._whole_to, entry.next_use)
        self._reads_in_flight.pop(key, None)
        self._pool.give(entry.slab)
