"""When the disk must have what a segment's turn has left to be written."""

from __future__ import annotations

from collections.abc import Sequence

from swaptrain.program.instructions import Instruction, Operation

__all__ = ["settling"]


def settling(program: Sequence[Instruction], *, repeats: int) -> frozenset[int]:
    """Return the positions whose instruction counts only when all commits before it are durable.

    One in each turn of a segment, so that a kill repeats the turn before and what of this one was
    done. With `repeats` 1 its first: what is repeated is one segment's. With 2 in a backward the
    one that ends it, so that a commit has as long as all micro-batches of the next segment.
    """
    positions: list[int] = []
    segment, owed = 0, False
    for position, instruction in enumerate(program):
        if not instruction.segment:
            continue
        if instruction.segment != segment:
            segment, owed = instruction.segment, True
        following = program[position + 1 : position + 2]
        backward = instruction.operation in (Operation.TURN, Operation.BACKWARD)
        goes_on = backward and bool(following) and following[0].segment == segment
        if owed and not (repeats > 1 and goes_on):
            positions.append(position)
            owed = False
    return frozenset(positions)
