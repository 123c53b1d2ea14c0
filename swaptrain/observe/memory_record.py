"""memory.json: what held memory at each instruction of the last step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swaptrain.memory.malloc import AllocatorBytes
from swaptrain.memory.slab import Slab, SlabPool
from swaptrain.observe.memory_growth import MemoryGrowth
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.program.instructions import Instruction, Kind, ObjectKey
from swaptrain.program.roles import Role
from swaptrain.store.paths import ASIDE

__all__ = ["HOLDERS", "MemoryRecord", "MemoryRow", "holder_of", "thinned"]

HOLDERS = ("weights", "state", "gradients", "values", "saved", "cache", "staging")
"""Who holds memory of the pool; docs/memory.md says what each is."""
_WEIGHTS, _STATE, _GRADIENTS, _VALUES, _SAVED = range(5)
_OF_KIND = {
    Kind.SHARED: _WEIGHTS,
    Kind.VALUE: _VALUES,
    Kind.GRADIENT: _GRADIENTS,
    Kind.ACCUMULATOR: _GRADIENTS,
    Kind.SAVED: _SAVED,
}
_MOST_ROWS = 2000
_ASKING = 0.002
"""Part of the time that asking the allocator may take."""
_LEAST_PAUSE_S = 1.0
"""Between two writings of the file, where steps are shorter; the last step is always written."""


class MemoryRow(NamedTuple):
    """What was held when an instruction had computed, before anything that it used was let go."""

    position: int
    """Among the instructions of the step, from 0."""
    operation: str
    segment: int
    micro_batch: int
    held: tuple[int, ...]
    """Bytes of each of `HOLDERS`."""
    allocated_bytes: int | None
    """In use of the allocator's, torch's tensors among them; None where it does not say, or was not
    asked yet at this instruction."""
    reserved_bytes: int | None
    resident_bytes: int

    @property
    def outside_bytes(self) -> int:
        """Resident, and held by nothing of swaptrain's."""
        return self.resident_bytes - sum(self.held)

    def tree(self) -> dict[str, Any]:
        """Return the row as memory.json has it."""
        return {
            "position": self.position,
            "operation": self.operation.upper(),
            "segment": self.segment,
            "micro_batch": self.micro_batch,
            "held": dict(zip(HOLDERS, self.held, strict=True)),
            "torch": {"allocated": self.allocated_bytes, "reserved": self.reserved_bytes},
            "resident_bytes": self.resident_bytes,
        }


class MemoryRecord:
    """Looks at memory after each instruction, and writes a file after each step.

    The file is for a person to read, so where it cannot be written the run goes on without it, and
    `note` says so. It is replaced as a whole, and not flushed.
    """

    def __init__(
        self,
        path: Path,
        pool: SlabPool,
        *,
        staging_bytes: Callable[[], int],
        allocator_bytes: Callable[[], AllocatorBytes | None],
        budget_bytes: int,
        base_bytes: int,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take who holds memory; `staging_bytes` are those of I/O that no slab has."""
        self._path, self._pool, self._note = path, pool, note
        self._staging_bytes, self._allocator_bytes = staging_bytes, allocator_bytes
        self._budget_bytes, self._base_bytes, self._clock = budget_bytes, base_bytes, clock
        self._rows: list[MemoryRow] = []
        self._asked: dict[tuple[str, int, int], AllocatorBytes] = {}
        """What the allocator said last, by operation, segment and micro-batch."""
        self._began_s, self._asking_s = clock(), 0.0
        self._growth = MemoryGrowth(least_bytes=budget_bytes // 10_000)
        self._unwritten: tuple[int, list[MemoryRow]] | None = None
        self._written_s = float("-inf")
        self._failed = False

    def weigh(self, instruction: Instruction, slabs: Mapping[ObjectKey, Slab]) -> None:
        """Note what is held now: `instruction` has computed, and `slabs` are still its own."""
        held = [0, 0, 0, 0, 0]
        for key, slab in slabs.items():
            held[holder_of(key)] += slab.nbytes
        live_bytes, pool_bytes = self._pool.live_bytes, self._pool.held_bytes
        staging_bytes = max(0, pool_bytes - live_bytes) + self._staging_bytes()
        allocator = self._ask(instruction)
        self._rows.append(
            MemoryRow(
                len(self._rows),
                instruction.operation,
                instruction.segment,
                instruction.micro_batch,
                (*held, live_bytes - sum(held), staging_bytes),
                None if allocator is None else allocator.allocated_bytes,
                None if allocator is None else allocator.reserved_bytes,
                resident_bytes(),
            )
        )

    def _ask(self, instruction: Instruction) -> AllocatorBytes | None:
        """Return what the allocator holds, or held at the same instruction of an earlier step.

        A C heap goes through all its free blocks to say it, for some tenths of a millisecond. It is
        asked at the first instruction of a step, at all of them while something is suspected to
        grow, and else as long as that takes a five-hundredth of the time.
        """
        place = instruction.operation, instruction.segment, instruction.micro_batch
        begun = self._clock()
        allowed = self._asking_s <= _ASKING * (begun - self._began_s)
        if not self._rows or allowed or self._growth.looks_closely:
            found = self._allocator_bytes()
            self._asking_s += self._clock() - begun
            if found is None:
                return None
            self._asked[place] = found
        return self._asked.get(place)

    def step_done(self, step: int) -> None:
        """Name what grows, and write what was noted since the step before."""
        rows, self._rows = self._rows, []
        for found in self._growth.add(step, rows):
            self._note(found.text())
        self._unwritten = step, rows
        if self._clock() - self._written_s >= _LEAST_PAUSE_S:
            self._write()

    def close(self) -> None:
        """Write the last step, if that is still to be done."""
        self._write()

    def _write(self) -> None:
        if self._failed or self._unwritten is None:
            return
        (step, rows), self._unwritten = self._unwritten, None
        tree = {
            "step": step,
            "budget_bytes": self._budget_bytes,
            "base_bytes": self._base_bytes,
            "instructions": [row.tree() for row in thinned(rows, _MOST_ROWS)],
            "growth": [found.tree() for found in self._growth.found],
        }
        aside = self._path.with_name(self._path.name + ASIDE)
        try:
            aside.write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")
            aside.replace(self._path)
        except OSError as error:
            self._failed = True
            reason = os.strerror(error.errno) if error.errno else str(error)
            self._note(f"{self._path} cannot be written ({reason}): the run goes on without it")
        self._written_s = self._clock()


def holder_of(key: ObjectKey) -> int:
    """Return the number of the holder that an object counts to, in `HOLDERS`."""
    if key.kind is Kind.STATE:
        return _STATE if key.role is Role.OPTIMIZER else _WEIGHTS
    return _OF_KIND[key.kind]


def thinned(rows: Sequence[MemoryRow], most: int) -> list[MemoryRow]:
    """Return at most `most` rows, in order: of each stretch those that are the most of anything."""
    if len(rows) <= most:
        return list(rows)
    peaks = {max(rows, key=lambda row: row.allocated_bytes or 0).position}
    for number in range(len(HOLDERS)):
        peaks.add(max((row.held[number], row.position) for row in rows)[1])
    stretches = max(1, (most - len(peaks)) // 2)
    size = -(-len(rows) // stretches)
    for begin in range(0, len(rows), size):
        stretch = rows[begin : begin + size]
        peaks |= set(_peaks(stretch))
    return [row for row in rows if row.position in peaks]


def _peaks(rows: Sequence[MemoryRow]) -> Iterator[int]:
    yield max(rows, key=lambda row: row.resident_bytes).position
    yield max(rows, key=lambda row: sum(row.held)).position
