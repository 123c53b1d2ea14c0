"""Which instructions a device may have under way together."""

from __future__ import annotations

from swaptrain.program.instructions import Instruction, Kind, Operation

__all__ = ["side_by_side"]

_COMPUTING = Operation.FORWARD, Operation.TURN, Operation.BACKWARD, Operation.EVALUATE


def side_by_side(first: Instruction, second: Instruction) -> bool:
    """Whether a device may begin the second before the host has done what follows the first.

    What the first has touched may still be on its way to the host, which may write it to the disk
    then, or give it up: the second must neither change it nor make it anew. Sums leave the device
    when nothing more is added to them.
    """
    if second.operation in _COMPUTING:
        if first.operation is Operation.NORMS and first.segment == second.segment:
            return False  # the host writes the sums as they are now
        unchanged = set(first.touches)
    elif second.operation in (Operation.NORMS, Operation.UPDATE):
        # Not beside a turn, since the losses have to be known; and a run may stop after the first,
        # but not between the parts of an update.
        if first.operation not in (Operation.FORWARD, Operation.BACKWARD) or second.goes_on:
            return False
        # State that the first reads may change: what an update makes is copied to the host after
        # its computing, which is after the first's, which is after the copies that it reads.
        unchanged = {*first.changes, *first.writes}
    else:
        return False
    if first.operation not in (*_COMPUTING, Operation.NORMS, Operation.UPDATE):
        return False
    changed = {key for key in second.changes if key.kind is not Kind.ACCUMULATOR}
    return changed.union(second.writes).isdisjoint(unchanged)
