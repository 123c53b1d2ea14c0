"""Rehearses steps of a plan: the tier's own decisions, on a clock that nobody waits for.

Processor and disk are each a queue. An instruction takes the seconds that were measured with no
I/O beside it, and sigma more for each second in which the disk is at work meanwhile; a request
takes its bytes over the disk's speed, behind those that were made before it. What is read when,
what gives way to it and what is waited for is what the tier decides, and the order is the
executor's. So the bytes are those that a run moves, with what is read twice since a commit still
holds its memory, and the seconds contain what cannot run side by side: a forward that finds all it
needs in memory leaves the disk idle, whatever its backward will wait for.
"""

from __future__ import annotations

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

__all__ = ["Rehearsal", "Rehearsed"]


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


class _Disk:
    """Serves one request after the other, slower while reads and writes are both under way."""

    def __init__(self, clock: _Clock, speed: Disk | None) -> None:
        self._clock, self._speed = clock, speed
        self.free_at = 0.0
        self._last = {"read": 0.0, "write": 0.0}
        self.moved = {"read": 0, "write": 0}

    def read(self, nbytes: int) -> _Appointment:
        speed = self._speed.read_bytes_per_s if self._speed else 0.0
        return self._request("read", "write", nbytes, speed)

    def write(self, nbytes: int) -> _Appointment:
        speed = self._speed.write_bytes_per_s if self._speed else 0.0
        return self._request("write", "read", nbytes, speed)

    def _request(self, kind: str, other: str, nbytes: int, alone: float) -> _Appointment:
        now = self._clock.now
        self.moved[kind] += nbytes
        if self._speed is None:
            return _Appointment(self._clock, now)
        both = self._last[other] > now
        self.free_at = max(now, self.free_at)
        self.free_at += nbytes / (self._speed.mixed_bytes_per_s if both else alone)
        self._last[kind] = self.free_at
        return _Appointment(self._clock, self.free_at)


class _NoMemory(Slab):
    """A slab that has a size and no memory."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes


class _Room(Pool):
    """A pool that only counts."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._taken_bytes = 0

    @property
    def live_bytes(self) -> int:
        return self._taken_bytes

    def take(self, nbytes: int) -> Slab:
        if self._taken_bytes + nbytes > self.budget_bytes:
            raise PoolExhausted(nbytes, self._taken_bytes, self.budget_bytes)
        self._taken_bytes += nbytes
        return _NoMemory(nbytes)

    def give(self, slab: Slab) -> None:
        self._taken_bytes -= slab.nbytes


class _Home:
    """Knows which objects the disk would have."""

    def __init__(self, clock: _Clock, disk: _Disk, size_bytes: Callable[[ObjectKey], int]) -> None:
        self._clock, self._disk, self._size_bytes = clock, disk, size_bytes
        self.spilled: set[ObjectKey] = set()
        self.commit: Sequence[Future[Any]] = ()
        """The last one, behind all others."""

    def size_bytes(self, key: ObjectKey) -> int:
        return self._size_bytes(key)

    def holds(self, key: ObjectKey) -> bool:
        return key.kind is Kind.STATE or key in self.spilled

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        return [self._disk.read(slab.nbytes)]

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        self.spilled.add(key)
        if key.kind is Kind.GRADIENT:
            self._clock.wait(self.commit)
        return [self._disk.write(slab.nbytes)]

    def forget(self, key: ObjectKey) -> None:
        self.spilled.discard(key)


class Rehearsal:
    """Runs programs one after the other; memory and clock go on from each to the next."""

    def __init__(
        self,
        size_bytes: Callable[[ObjectKey], int],
        pool_bytes: int,
        *,
        seconds: Callable[[Instruction], float],
        disk: Disk | None,
        sigma: float = 0.0,
    ) -> None:
        """Take what an instruction takes with no I/O beside it, and a disk; None takes no time."""
        self._seconds, self._sigma = seconds, sigma
        self._size_bytes = size_bytes = cache(size_bytes)
        self._clock = _Clock()
        self._disk = _Disk(self._clock, disk)
        self._home = _Home(self._clock, self._disk, size_bytes)
        self._tier = Tier(_Room(pool_bytes), self._home, self._clock.wait)
        self._visit = 0
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

        `durable` names what an instruction makes durable. The next segment's first instruction
        waits for it, or, where the store is committed as a whole, the end of the program.
        """
        begun, before = self._clock.now, dict(self._disk.moved)
        self._visit = 0  # the first segment's, which was the last one of the step before, is new
        committed_bytes = 0
        made = {key for instruction in program for key in instruction.writes}
        needed = {key for instruction in program for key in instruction.needs}
        self._home.spilled |= needed - made - set(self._tier.resident())  # of the step before
        if commits == "segments":
            self._tier.follow(program, following, durable)
        else:
            self._tier.follow(program, following)
        for position, instruction in enumerate(program):
            self._tier.acquire(instruction, position)
            self._tier.prefetch(position)
            self._compute(instruction)
            if commits == "segments" and instruction.segment not in (0, self._visit):
                self._visit = instruction.segment
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

    def _compute(self, instruction: Instruction) -> None:
        clock, seconds = self._clock, self._seconds(instruction)
        busy = max(0.0, self._disk.free_at - clock.now)
        slowed = min(seconds / (1 - self._sigma) if self._sigma < 1 else busy, busy)
        clock.now += seconds + self._sigma * slowed

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
        ends = [self._disk.write(self._size_bytes(key)) for key in held]
        self._home.spilled.update(key for key in held if key.kind is not Kind.STATE)
        if instruction.operation is Operation.FORWARD:
            self._values += ends
            for key, end in zip(held, ends, strict=True):
                self._tier.saving([key], end)
        elif ends:
            self._home.commit = (ends[-1],)  # behind those before it
            self._tier.saving(held, ends[-1])
        return sum(self._size_bytes(key) for key in held)
