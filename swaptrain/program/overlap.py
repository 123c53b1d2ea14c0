"""Which instructions may be under way together, and when the disk must have what a turn leaves."""

from __future__ import annotations

from collections.abc import Sequence

from swaptrain.program.instructions import Instruction, Kind, Operation

__all__ = ["settling", "side_by_side"]

_COMPUTING = Operation.FORWARD, Operation.TURN, Operation.BACKWARD, Operation.EVALUATE


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
    when nothing more is added to them.
    """
    if second.operation in _COMPUTING:
        if first.operation is Operation.SETTLE and first.segment == second.segment:
            return False  # the host writes the sums as they are now
        kept = set(first.touches)
    elif second.operation in (Operation.SETTLE, Operation.UPDATE):
        # Not beside a turn, since the losses have to be known; and a run may stop behind the first,
        # but not between the parts of an update.
        if first.operation not in (Operation.FORWARD, Operation.BACKWARD) or second.goes_on:
            return False
        # State that the first reads may change: what an update makes is copied to the host behind
        # its computing, which is behind the first's, which is behind the copies that it reads.
        kept = {*first.changes, *first.writes}
    else:
        return False
    if first.operation not in (*_COMPUTING, Operation.SETTLE, Operation.UPDATE):
        return False
    changed = {key for key in second.changes if key.kind is not Kind.ACCUMULATOR}
    return changed.union(second.writes).isdisjoint(kept)
