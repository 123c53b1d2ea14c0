"""Which instructions may be under way together, and when the disk must have what a turn leaves."""

from __future__ import annotations

from collections.abc import Sequence

from swaptrain.program.instructions import Instruction, Kind, Operation

__all__ = ["settling", "side_by_side"]

_COMPUTING = Operation.FORWARD, Operation.TURN, Operation.BACKWARD, Operation.EVALUATE
_SUMMED = Operation.KEEP, Operation.SETTLE
"""They need the sums of a segment, and change nothing."""


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


def side_by_side(first: Instruction, second: Instruction) -> bool:
    """Whether a device may begin the second before the host has done what follows the first.

    What the first has touched may still be on its way to the host, which may write it to the disk
    then, or give it up: the second must neither change it nor make it anew. Sums leave the device
    when nothing more is added to them, and wait where they are written. State that the first has
    only read stays where it is, so an update may change it. What has to know that the losses are
    finite does not begin beside what makes one.
    """
    if second.operation in _COMPUTING:
        touched = set(first.touches)
        sums_go = first.operation in _SUMMED and first.segment != second.segment
        begins = sums_go or first.operation in (*_COMPUTING, Operation.UPDATE)
    else:
        touched = {*first.changes, *first.writes}
        begins = first.operation in (Operation.FORWARD, Operation.BACKWARD)
        begins &= second.operation in (*_SUMMED, Operation.UPDATE)
    changed = {key for key in second.changes if key.kind is not Kind.ACCUMULATOR}
    return begins and changed.union(second.writes).isdisjoint(touched)
