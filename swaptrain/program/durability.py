"""What a step makes durable with each instruction, and which instructions are barriers.

Everybody who has to know asks one object: the executor, which carries it out, the tier, which plans
memory by it, the simulation and the hand-off. docs/durability.md has the protocol.

Of two kinds. State, finished gradients and the hand-off cannot be made again: a run that leaves out
any of them ends with other bits, or not at all, after a kill. Barriers, visits and activations lose
nothing, since the committer goes in order: they bound the work that a kill repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program

__all__ = ["CommitUnit", "Durability", "Made", "barriers", "visits"]

CommitUnit = Literal["segment", "step", "nothing"]
"""What a program commits together: a segment after its update, or the whole store at the end of the
step. `nothing`: with the unit `step`, a program that does not commit."""

_COMPUTES_GRADIENTS = Operation.TURN, Operation.BACKWARD


@dataclass(frozen=True)
class Made:
    """What begins to be written when an instruction has ended."""

    objects: tuple[ObjectKey, ...] = ()
    """New state, finished gradients, or activations."""
    handed_on: tuple[ObjectKey, ...] = ()
    """Gradients of activations that are alive and that no commit of the step before has written."""
    alive: tuple[ObjectKey, ...] = ()
    """All of those that are alive: the record names each, so that a resumed step finds them."""

    @property
    def written(self) -> tuple[ObjectKey, ...]:
        """Everything that is written."""
        return self.objects + self.handed_on


_NOTHING = Made()


class Durability:
    """What a program makes durable, by the positions of its instructions."""

    def __init__(
        self,
        program: Program,
        following: Program = (),
        *,
        unit: CommitUnit = "segment",
        keeps_activations: bool = False,
        lag: int = 1,
    ) -> None:
        """Take a program and what runs after it; positions go on from one to the other.

        With `keeps_activations` each forward's results are written too. `lag` is that of
        `barriers`.
        """
        instructions = (*program, *following)
        self.unit = unit
        self.writes_end = barriers(instructions, lag=lag)
        """Positions at which the writes that were begun before the visit have ended, as planned."""
        self.barriers = self.writes_end if unit == "segment" else frozenset[int]()
        """Positions whose instruction counts only when all commits before it are durable: a kill
        repeats one segment's backward. Without them it repeats as many as there are free slots."""
        self.visits = visits(instructions) if unit == "segment" else frozenset[int]()
        """Positions whose instruction counts only when the activations of the visit before are
        written: a kill then repeats what was done in one segment."""
        self._made: dict[int, Made] = {}
        if unit == "segment":
            self._made = _made(instructions, keeps_activations=keeps_activations)
        elif unit == "step":
            self._made = {
                position: Made(tuple(instruction.new_state))
                for position, instruction in enumerate(instructions)
                if instruction.operation in (Operation.UPDATE, Operation.STORE)
            }

    def made(self, position: int) -> Made:
        """Return what is written when the instruction there has ended."""
        return self._made.get(position, _NOTHING)

    def planned(self, position: int) -> tuple[ObjectKey, ...]:
        """Return the objects that a plan of memory takes as clean after the instruction there.

        Where the whole store is committed they are planned as dirty: what is written to the tree
        that is not live is no commit until its end.
        """
        return self.made(position).written if self.unit == "segment" else ()


def visits(program: Sequence[Instruction]) -> frozenset[int]:
    """Return the positions at which another segment is visited. A batch is no segment's."""
    found: list[int] = []
    segment = 0
    for position, instruction in enumerate(program):
        if instruction.segment not in (0, segment):
            segment = instruction.segment
            found.append(position)
    return frozenset(found)


def barriers(program: Sequence[Instruction], *, lag: int) -> frozenset[int]:
    """Return the positions whose instruction counts only when all commits before it are durable.

    There is one in each visit of a segment, so that a kill repeats the visit before and the part of
    this one that was done. With a `lag` of 1 it is the visit's first instruction: one segment is
    repeated. With 2 it is the one that ends a backward, so that a commit has as long as all
    micro-batches of the next segment.
    """
    begins = visits(program)
    found: list[int] = []
    owed = False
    for position, instruction in enumerate(program):
        owed |= position in begins
        if owed and instruction.segment and not (lag > 1 and _backward_goes_on(program, position)):
            found.append(position)
            owed = False
    return frozenset(found)


def _backward_goes_on(program: Sequence[Instruction], position: int) -> bool:
    instruction = program[position]
    following = program[position + 1 : position + 2]
    return (
        instruction.operation in _COMPUTES_GRADIENTS
        and bool(following)
        and following[0].segment == instruction.segment
    )


def _made(program: Program, *, keeps_activations: bool) -> dict[int, Made]:
    """Return what each instruction of a program makes durable where segments commit.

    An update commits its segment's state, part by part, and with the last part the hand-off. A
    finished gradient is written with its norms, and with the hand-off too. A forward's results are
    written with `keeps_activations`, and after the last micro-batch the buffers that it leaves.
    """
    steps = (Operation.FORWARD, *_COMPUTES_GRADIENTS)
    last = max((i.micro_batch for i in program if i.operation in steps), default=0)
    alive = dict.fromkeys(_gradients_before(program))
    unwritten: dict[ObjectKey, None] = {}
    made: dict[int, Made] = {}
    for position, instruction in enumerate(program):
        new = dict.fromkeys(key for key in instruction.writes if key.kind is Kind.GRADIENT)
        alive.update(new)
        unwritten.update(new)
        for key in instruction.frees:
            alive.pop(key, None)
            unwritten.pop(key, None)
        if instruction.operation is Operation.UPDATE and instruction.goes_on:
            made[position] = Made(tuple(instruction.new_state))
        elif instruction.operation in (Operation.UPDATE, Operation.NORMS):
            update = instruction.operation is Operation.UPDATE
            own = instruction.new_state if update else instruction.reads
            made[position] = Made(tuple(own), tuple(unwritten), tuple(alive))
            unwritten.clear()
        elif instruction.operation is Operation.FORWARD and keeps_activations:
            made[position] = Made(_forwarded(instruction, last=last))
    return made


def _forwarded(instruction: Instruction, *, last: int) -> tuple[ObjectKey, ...]:
    keys = [key for key in instruction.writes if key.kind is Kind.VALUE]
    if instruction.micro_batch == last:
        keys += [key for key in instruction.changes if key.kind is Kind.STATE]
    return tuple(keys)


def _gradients_before(program: Program) -> list[ObjectKey]:
    """Return the gradients that a program takes over from what ran before it: a resumed step's."""
    written: set[ObjectKey] = set()
    found: dict[ObjectKey, None] = {}
    for instruction in program:
        needed = [key for key in instruction.needs if key.kind is Kind.GRADIENT]
        found.update(dict.fromkeys(key for key in needed if key not in written))
        written.update(instruction.writes)
    return list(found)
