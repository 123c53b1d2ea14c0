"""Begins exchanges before their turn, and lets sends go on after it: beside the computing.

Weights are shared while the segment before is computed, sums sent while the next one is. The order
of all shares is that of the program in every rank, and nobody waits for one before its turn: so no
two ranks wait for each other, whenever each begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swaptrain.memory.slab import Slab
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Instruction, ObjectKey, Operation, Program
from swaptrain.ranks.exchange import Exchange

__all__ = ["Exchanges", "Moving"]


@dataclass(frozen=True)
class Moving:
    """An exchange that was begun; its objects are pinned until it is ended and released."""

    position: int
    instruction: Instruction
    slabs: Mapping[ObjectKey, Slab]
    waits: list[Callable[[], None]]

    def end(self) -> None:
        """Wait until it is done."""
        for wait in self.waits:
            wait()


class Exchanges:
    """The exchanges of the program that runs, each begun when there is room for it."""

    def __init__(self, exchange: Exchange, tier: Tier) -> None:
        self._exchange, self._tier = exchange, tier
        self._program: Program = ()
        self._shares: list[int] = []
        self._ahead: Moving | None = None
        self._considered = -1
        self._fits = False

    def follow(self, program: Program) -> None:
        """Take the program that runs from now on."""
        self._program, self._considered = program, -1
        self._shares = [
            position for position, i in enumerate(program) if i.operation is Operation.SHARE
        ][::-1]

    def begin(self, position: int) -> Moving:
        """Begin the exchange whose turn it is, if it was not begun before; return it."""
        if self._ahead is not None and self._ahead.position == position:
            moving, self._ahead = self._ahead, None
            return moving
        instruction = self._program[position]
        if instruction.operation is Operation.SHARE:
            self._shares.pop()
        slabs = self._tier.acquire(instruction, position)
        self._tier.prefetch(position)
        waits = self._exchange.begin(instruction, slabs)
        return Moving(position, instruction, slabs, waits)

    def begin_ahead(self, position: int) -> None:
        """Begin the next share, if all that it needs is in memory, and room for the rest.

        Nothing waits, and nothing leaves memory for it.
        """
        if self._ahead is not None or not self._shares:
            return
        later = self._shares[-1]
        instruction = self._program[later]
        if later != self._considered:
            self._considered, self._fits = later, self._may(position, later)
        if not self._fits or not all(map(self._tier.ready, instruction.reads)):
            return
        if not self._tier.has_room_for(instruction.writes):
            return
        self._shares.pop()
        slabs = self._tier.acquire(instruction, position)
        waits = self._exchange.begin(instruction, slabs)
        self._ahead = Moving(later, instruction, slabs, waits)

    def may_stay(self, moving: Moving) -> bool:
        """Whether sums may be on their way until the next ones are there."""
        first = moving.position + 1
        last = next(
            (p for p in range(first, len(self._program)) if self._collects(p)), len(self._program)
        )
        return bool(moving.instruction.reads) and self._room(moving.instruction, first, last)

    def _collects(self, position: int) -> bool:
        return self._program[position].operation is Operation.COLLECT

    def _may(self, position: int, later: int) -> bool:
        """Whether what a share reads and writes stays as it is up to its turn, and all has room."""
        keys = set(self._program[later].touches)
        for between in self._program[position:later]:
            if not keys.isdisjoint((*between.changes, *between.writes, *between.frees)):
                return False
        return self._room(self._program[later], position, later)

    def _room(self, instruction: Instruction, first: int, last: int) -> bool:
        """Whether an exchange has room beside what the plan holds while some instructions run."""
        own = sum(self._tier.size_bytes(key) for key in set(instruction.touches))
        return own <= self._tier.planned_room(first, last)
