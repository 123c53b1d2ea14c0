"""Rehearses steps of a plan: the tier's own decisions, on a clock that nobody waits for.

Processor and disk are each a queue. An instruction takes the seconds that were measured with no
I/O beside it, and as many more as the requests that the disk serves meanwhile cost the processor; a
request takes its bytes over the disk's speed, behind those that were made before it. What is read
when, what gives way to it and what is waited for is what the tier decides, and the order is the
executor's (but for a GPU's, which has the next instruction begun before one has ended). So the
bytes are those that a run moves, with what is read twice since a commit still holds its memory, and
the seconds contain what cannot run side by side: a forward that finds all it needs in memory leaves
the disk idle, whatever its backward will wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from swaptrain.memory.slab import Pool, PoolExhausted, Slab
from swaptrain.memory.tier import Tier
from swaptrain.program.cost import Disk
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.residency import Traffic
from swaptrain.program.turns import settling

__all__ = ["Access", "Rehearsal", "Rehearsed", "Room"]

Access = Literal["read", "spill", "commit"]
Work = Callable[[ObjectKey, Access], float]
"""The seconds that computing loses while an object is read or written."""

_SHORTEST_S = 1e-6
"""What is not worth reckoning with."""


@dataclass(frozen=True)
class Rehearsed:
    """What a step took."""

    traffic: Traffic
    seconds: float


class _Clock:
    """Says what time it would be."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, fs: Sequence[Future[Any]], *, return_when: str = ALL_COMPLETED) -> None:
        """Let time pass until all appointments, or the first one, have come."""
        ends = [future.at for future in fs if isinstance(future, _Appointment)]
        if ends:
            self.now = max(self.now, min(ends) if return_when == FIRST_COMPLETED else max(ends))


class _Appointment(Future[Any]):
    """A request that is done at a time that is known in advance."""

    def __init__(self, clock: _Clock, at: float) -> None:
        super().__init__()
        self.at, self._clock = at, clock

    def done(self) -> bool:
        return self._clock.now >= self.at

    def result(self, timeout: float | None = None) -> None:
        """Nothing fails here."""


@dataclass
class _Served:
    """When the disk is at work for a request, and what that costs the processor."""

    begin: float
    end: float
    work_s: float


class _Disk:
    """Serves one request after the other, slower while reads and writes are both under way."""

    def __init__(self, clock: _Clock, speed: Disk | None) -> None:
        self._clock, self._speed = clock, speed
        self.free_at = 0.0
        self._last = {"read": 0.0, "write": 0.0}
        self.moved = {"read": 0, "write": 0}
        self._served: deque[_Served] = deque()

    def read(self, nbytes: int, work_s: float) -> _Appointment:
        speed = self._speed.read_bytes_per_s if self._speed else 0.0
        return self._request("read", "write", nbytes, speed, work_s)

    def write(self, nbytes: int, work_s: float) -> _Appointment:
        speed = self._speed.write_bytes_per_s if self._speed else 0.0
        return self._request("write", "read", nbytes, speed, work_s)

    def work_until(self, at: float) -> float:
        """Return what the requests cost the processor from the last call on until `at`."""
        work_s = 0.0
        while self._served and self._served[0].begin < at:
            first = self._served[0]
            if first.end <= at:
                work_s += self._served.popleft().work_s
                continue
            done_s = (at - first.begin) / (first.end - first.begin) * first.work_s
            first.begin, first.work_s = at, first.work_s - done_s
            work_s += done_s
        return work_s

    def _request(
        self, kind: str, other: str, nbytes: int, alone: float, work_s: float
    ) -> _Appointment:
        now = self._clock.now
        self.moved[kind] += nbytes
        if self._speed is None:
            return _Appointment(self._clock, now)
        both = self._last[other] > now
        begin = max(now, self.free_at)
        self.free_at = begin + nbytes / (self._speed.mixed_bytes_per_s if both else alone)
        self._served.append(_Served(begin, self.free_at, work_s))
        self._last[kind] = self.free_at
        return _Appointment(self._clock, self.free_at)


class _NoMemory(Slab):
    """A slab that has a size and no memory."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes


class Room:
    """A pool that only counts."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.live_bytes = 0

    def has_room(self, nbytes: int) -> bool:
        return self.live_bytes + nbytes <= self.budget_bytes

    def take(self, nbytes: int) -> Slab:
        if not self.has_room(nbytes):
            raise PoolExhausted(nbytes, self.live_bytes, self.budget_bytes)
        self.live_bytes += nbytes
        return _NoMemory(nbytes)

    def give(self, slab: Slab) -> None:
        self.live_bytes -= slab.nbytes

    def join(self, nbytes: int, most_bytes: int) -> bool:
        return self.has_room(nbytes)


class _Home:
    """Knows which objects the disk would have."""

    def __init__(
        self, clock: _Clock, disk: _Disk, size_bytes: Callable[[ObjectKey], int], work: Work
    ) -> None:
        self._clock, self._disk, self._size_bytes, self._work = clock, disk, size_bytes, work
        self.spilled: set[ObjectKey] = set()
        self.commit: Sequence[Future[Any]] = ()
        """The last one, behind all others."""

    def size_bytes(self, key: ObjectKey) -> int:
        return self._size_bytes(key)

    def holds(self, key: ObjectKey) -> bool:
        return key.kind is Kind.STATE or key in self.spilled

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        return [self._disk.read(slab.nbytes, self._work(key, "read"))]

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        self.spilled.add(key)
        if key.kind is Kind.GRADIENT:
            self._clock.wait(self.commit)
        return [self._disk.write(slab.nbytes, self._work(key, "spill"))]

    def forget(self, key: ObjectKey) -> None:
        self.spilled.discard(key)


class Rehearsal:
    """Runs programs one after the other; memory and clock go on from each to the next."""

    def __init__(
        self,
        size_bytes: Callable[[ObjectKey], int],
        pool: Pool,
        *,
        seconds: Callable[[Instruction], float],
        disk: Disk | None,
        work: Work = lambda *_: 0.0,
        commit_work_s: float = 0.0,
        repeats: int = 1,
    ) -> None:
        """Take what an instruction takes with no I/O beside it, and a disk; None takes no time.

        `commit_work_s` is what a commit costs the processor beside the `work` of its writes. The
        pool is a `Room`, which only counts, or one whose slabs are memory. `repeats` is
        `store.repeats`.
        """
        self._seconds, self._work, self._commit_work_s = seconds, work, commit_work_s
        self._repeats = repeats
        self._size_bytes = size_bytes = cache(size_bytes)
        self._clock = _Clock()
        self._disk = _Disk(self._clock, disk)
        self._home = _Home(self._clock, self._disk, size_bytes, work)
        self._tier = Tier(pool, self._home, self._clock.wait)
        self._visit = 0
        self._computed_until = 0.0
        self._values: list[Future[Any]] = []

    def run(
        self,
        program: Program,
        following: Program,
        durable: Callable[[Instruction], Iterable[ObjectKey]],
        *,
        commits: Literal["segments", "store"] = "segments",
    ) -> Rehearsed:
        """Run a program that `following` comes behind.

        `durable` names what an instruction makes durable. An instruction of the next segment waits
        for it (`settling`), or, where the store is committed as a whole, the end of the program.
        """
        begun, before = self._clock.now, dict(self._disk.moved)
        self._visit = 0  # the first segment's, which was the last one of the step before, is new
        committed_bytes = 0
        made = {key for instruction in program for key in instruction.writes}
        needed = {key for instruction in program for key in instruction.needs}
        self._home.spilled |= needed - made - set(self._tier.resident())  # of the step before
        if commits == "segments":
            self._tier.follow(program, following, durable, repeats=self._repeats)
        else:
            self._tier.follow(program, following)
        settles = settling(program, repeats=self._repeats) if commits == "segments" else ()
        for position, instruction in enumerate(program):
            self._tier.acquire(instruction, position)
            self._tier.prefetch(position)
            self._compute(instruction)
            if commits == "segments" and instruction.segment not in (0, self._visit):
                self._visit = instruction.segment
                self._clock.wait(self._values)
                self._values = []
            if position in settles:
                self._settle()
            committed_bytes += self._make_durable(instruction, durable(instruction))
            self._tier.release(instruction)
            self._tier.write_behind(position)
        if commits == "store":
            self._settle()
        return Rehearsed(
            Traffic(
                self._disk.moved["read"] - before["read"],
                self._disk.moved["write"] - before["write"],
                committed_bytes,
            ),
            self._clock.now - begun,
        )

    def close(self) -> None:
        """Give all slabs back to the pool."""
        self._tier.close()

    def _compute(self, instruction: Instruction) -> None:
        clock, disk = self._clock, self._disk
        waited_s = clock.now - self._computed_until  # the processor had nothing else to do
        seconds = self._seconds(instruction) + max(0.0, disk.work_until(clock.now) - waited_s)
        while seconds > _SHORTEST_S:
            clock.now += seconds
            seconds = disk.work_until(clock.now)
        self._computed_until = clock.now

    def _settle(self) -> None:
        self._clock.wait([*self._home.commit, *self._values])
        self._home.commit, self._values = (), []

    def _make_durable(self, instruction: Instruction, keys: Iterable[ObjectKey]) -> int:
        """Begin to write what an instruction makes durable; return its bytes."""
        keys = list(keys)
        if not keys:
            return 0
        resident = set(self._tier.resident())
        held = [key for key in keys if key in resident]  # the rest is on the disk by itself
        works = [self._work(key, "commit") for key in held]
        if held and instruction.operation is not Operation.FORWARD and not instruction.goes_on:
            works[-1] += self._commit_work_s
        ends = [
            self._disk.write(self._size_bytes(key), work)
            for key, work in zip(held, works, strict=True)
        ]
        self._home.spilled.update(key for key in held if key.kind is not Kind.STATE)
        if instruction.operation is Operation.FORWARD:
            self._values += ends
            for key, end in zip(held, ends, strict=True):
                self._tier.saving([key], end)
        elif ends:
            self._home.commit = (ends[-1],)  # behind those before it
            for key, end in zip(held, ends, strict=True):
                self._tier.saving([key], end if instruction.goes_on else ends[-1])
        return sum(self._size_bytes(key) for key in held)
