"""Rehearses steps of a plan: the tier's own decisions, on a clock that nobody waits for.

The processor is a queue, and the disk one for reads and one for writes. An instruction takes the
seconds that were measured with no I/O beside it, and as many more as the requests that the disk
serves meanwhile cost the processor; a request takes its bytes over the disk's speed, after those
of its kind that were made before it. What is read when, what gives way to it and what is waited for
is what the tier decides, and the order is the executor's (but for a GPU's, which has the next
instruction begun before one has ended). So the bytes are those that a run moves, with what is read
twice since a commit still holds its memory, and the seconds contain what cannot run side by side: a
forward that finds all it needs in memory leaves the disk idle, whatever its backward will wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from swaptrain.memory.slab import Pool, PoolExhausted, Slab
from swaptrain.memory.tier import Tier
from swaptrain.program.cost import Disk
from swaptrain.program.durability import Durability
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.residency import Traffic

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
    meetings: tuple[float, ...] = ()
    """When each exchange with other ranks began, in seconds since the step did."""


class _Request(Future[Any]):
    """A request of the disk; nothing fails here."""

    def __init__(self, disk: _Disk, nbytes: float, work_s: float) -> None:
        super().__init__()
        self._disk, self.left_bytes = disk, nbytes
        self.work_byte_s = work_s / nbytes if nbytes else 0.0
        """What moving a byte of it costs the processor."""

    def done(self) -> bool:
        self._disk.serve()
        return not self.left_bytes

    def result(self, timeout: float | None = None) -> None:
        """Nothing fails here."""


class _Disk:
    """Serves reads in their order and, beside them, writes in theirs; and has the clock.

    Where both are under way each has half of what the disk does then, or what it does alone.
    """

    def __init__(self, speed: Disk | None) -> None:
        self.now = 0.0
        self.moved = {"read": 0, "write": 0}
        self.queues: dict[str, deque[_Request]] = {"read": deque(), "write": deque()}
        self._alone, self._beside = {"read": 0.0, "write": 0.0}, 0.0
        self._instant = speed is None
        if speed is not None:
            self._alone = {"read": speed.read_bytes_per_s, "write": speed.write_bytes_per_s}
            self._beside = speed.mixed_bytes_per_s / 2
        self._served_to = self._work_s = 0.0

    def request(self, kind: Access, nbytes: int, work_s: float) -> _Request:
        """Begin to read, or to write."""
        way = "read" if kind == "read" else "write"
        self.serve()
        self.moved[way] += nbytes
        request = _Request(self, 0 if self._instant else nbytes, work_s)
        if request.left_bytes:
            self.queues[way].append(request)
        return request

    def wait(self, fs: Sequence[Future[Any]], *, return_when: str = ALL_COMPLETED) -> None:
        """Let time pass until all of these requests, or the first one, are done."""
        enough = any if return_when == FIRST_COMPLETED else all
        requests = [future for future in fs if isinstance(future, _Request)]
        while requests and not enough(request.done() for request in requests):
            self._serve_next(math.inf)
            self.now = max(self.now, self._served_to)

    def serve(self) -> None:
        """Do what the disk has done by now."""
        while self._served_to < self.now:
            self._serve_next(self.now - self._served_to)

    def work_s(self) -> float:
        """Return what the requests have cost the processor since the last call."""
        self.serve()
        work_s, self._work_s = self._work_s, 0.0
        return work_s

    def _serve_next(self, most_s: float) -> None:
        """Serve until a request is done, for `most_s` at most."""
        under_way = self._under_way()
        seconds = min((queue[0].left_bytes / speed for queue, speed in under_way), default=most_s)
        seconds = min(seconds, most_s)
        for queue, speed in under_way:
            first = queue[0]
            moved = min(first.left_bytes, seconds * speed)
            if first.left_bytes / speed <= seconds:
                moved = first.left_bytes
                queue.popleft()
            first.left_bytes -= moved
            self._work_s += moved * first.work_byte_s
        self._served_to = self.now if seconds == most_s else self._served_to + seconds

    def _under_way(self) -> list[tuple[deque[_Request], float]]:
        """Return the queues in which there is something, and what the disk does of each."""
        both = all(self.queues.values())
        return [
            (queue, min(self._alone[way], self._beside) if both else self._alone[way])
            for way, queue in self.queues.items()
            if queue
        ]


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


class _Backing:
    """Knows which objects the disk would have."""

    def __init__(self, disk: _Disk, size_bytes: Callable[[ObjectKey], int], work: Work) -> None:
        self._disk, self._size_bytes, self._work = disk, size_bytes, work
        self.spilled: set[ObjectKey] = set()
        self.commit: Sequence[Future[Any]] = ()
        """The last one, after all others."""

    def size_bytes(self, key: ObjectKey) -> int:
        return self._size_bytes(key)

    def holds(self, key: ObjectKey) -> bool:
        return key.kind is Kind.STATE or key in self.spilled

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        return [self._disk.request("read", slab.nbytes, self._work(key, "read"))]

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        self.spilled.add(key)
        if key.kind is Kind.GRADIENT:
            self._disk.wait(self.commit)
        return [self._disk.request("spill", slab.nbytes, self._work(key, "spill"))]

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
    ) -> None:
        """Take what an instruction takes with no I/O beside it, and a disk; None takes no time.

        `commit_work_s` is what a commit costs the processor beside the `work` of its writes. The
        pool is a `Room`, which only counts, or one whose slabs are memory.
        """
        self._seconds, self._work, self._commit_work_s = seconds, work, commit_work_s
        self._size_bytes = size_bytes = cache(size_bytes)
        self._disk = _Disk(disk)
        self._backing = _Backing(self._disk, size_bytes, work)
        self._tier = Tier(pool, self._backing, self._disk.wait)
        self._computed_until = 0.0
        self._values: list[Future[Any]] = []

    def run(self, program: Program, following: Program, durability: Durability) -> Rehearsed:
        """Run a program that `following` comes after, with the writes and waits of `durability`.

        Where the store is committed as a whole, the end of the program waits for the writes.
        """
        begun, before = self._disk.now, dict(self._disk.moved)
        committed_bytes, meetings = 0, list[float]()
        made = {key for instruction in program for key in instruction.writes}
        needed = {key for instruction in program for key in instruction.needs}
        self._backing.spilled |= needed - made - set(self._tier.resident())  # of the step before
        self._tier.follow(program, following, durability)
        for position, instruction in enumerate(program):
            self._tier.acquire(instruction, position)
            self._tier.prefetch(position)
            if instruction.is_exchange:
                meetings.append(self._disk.now - begun)
            self._compute(instruction)
            if position in durability.visits:
                self._disk.wait(self._values)
                self._values = []
            if position in durability.barriers:
                self._barrier()
            committed_bytes += self._make_durable(instruction, durability.made(position).written)
            self._tier.release(instruction)
            self._tier.write_behind(position)
        if durability.unit == "step":
            self._barrier()
        return Rehearsed(
            Traffic(
                self._disk.moved["read"] - before["read"],
                self._disk.moved["write"] - before["write"],
                committed_bytes,
            ),
            self._disk.now - begun,
            tuple(meetings),
        )

    def close(self) -> None:
        """Give all slabs back to the pool."""
        self._tier.close()

    def _compute(self, instruction: Instruction) -> None:
        disk = self._disk
        waited_s = disk.now - self._computed_until  # the processor had nothing else to do
        seconds = self._seconds(instruction) + max(0.0, disk.work_s() - waited_s)
        while seconds > _SHORTEST_S:
            disk.now += seconds
            seconds = disk.work_s()
        self._computed_until = disk.now

    def _barrier(self) -> None:
        self._disk.wait([*self._backing.commit, *self._values])
        self._backing.commit, self._values = (), []

    def _make_durable(self, instruction: Instruction, keys: Iterable[ObjectKey]) -> int:
        """Begin to write what an instruction makes durable; return its bytes."""
        keys = list(keys)
        if not keys:
            return 0
        # The rest is on the disk by itself, on its way back into memory or not.
        resident = [key for key in keys if self._tier.ready(key) is not None]
        works = [self._work(key, "commit") for key in resident]
        if resident and instruction.operation is not Operation.FORWARD and not instruction.goes_on:
            works[-1] += self._commit_work_s
        ends = [
            self._disk.request("commit", self._size_bytes(key), work)
            for key, work in zip(resident, works, strict=True)
        ]
        self._backing.spilled.update(key for key in resident if key.kind is not Kind.STATE)
        if instruction.operation is Operation.FORWARD:
            self._values += ends
            for key, end in zip(resident, ends, strict=True):
                self._tier.saving([key], end)
        elif ends:
            self._backing.commit = (ends[-1],)  # after those before it
            for key, end in zip(resident, ends, strict=True):
                self._tier.saving([key], end if instruction.goes_on else ends[-1])
        return sum(self._size_bytes(key) for key in resident)
