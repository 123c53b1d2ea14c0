"""Which forwards a step that an earlier process began has still to run."""

from __future__ import annotations

from collections.abc import Collection

from swaptrain.program.instructions import Kind, ObjectKey, Operation, Program
from swaptrain.program.model import SegmentSpec
from swaptrain.program.objects import Objects

__all__ = ["forwards_left", "recoverable"]


def recoverable(program: Program) -> list[ObjectKey]:
    """Return what spares a step's forwards, if an earlier process left it on the disk.

    Values, the buffers from before a forward, and, of `STATE` kind, the buffers as the step's last
    forward of their segment left them.
    """
    keys: dict[ObjectKey, None] = {}
    for instruction in program:
        if instruction.operation is Operation.FORWARD:
            made = (key for key in instruction.writes if key.kind is Kind.VALUE)
            keys.update(dict.fromkeys((*made, *instruction.changes)))
    return list(keys)


def forwards_left(
    objects: Objects,
    micro_batches: int,
    last: int,
    *,
    present: Collection[ObjectKey],
    pending_updates: Collection[int],
) -> frozenset[tuple[int, int]]:
    """Return (segment, micro-batch) of the forwards up to segment `last` that have to be run.

    What the backwards of segments 1 to `last` read must come from a forward or be `present`, and so
    must what those forwards read. The backward of `last` is its forward as well, where it learns.
    A segment that mutates buffers runs all of its forwards or none, since each starts from the
    buffers that the one before left: none if everything is there, the buffers after the step's
    last forward included, and its update of the step before is done, which would commit them.
    """
    present = frozenset(present)
    every = range(micro_batches)
    left: set[tuple[int, int]] = set()
    readers = {s.index for s in objects.model.segments[:last] if objects.learns(s)}
    for segment in reversed(objects.model.segments[:last]):
        if segment.index == last and last in readers:
            continue
        missing = [m for m in every if not _made(objects, segment, m, readers, left, present)]
        buffers = objects.buffers(segment)
        if buffers:
            whole = (
                not missing and present.issuperset(buffers) and segment.index not in pending_updates
            )
            missing = [] if whole else list(every)
        left.update((segment.index, m) for m in missing)
    return frozenset(left)


def _made(
    objects: Objects,
    segment: SegmentSpec,
    m: int,
    backwards: Collection[int],
    forwards: Collection[tuple[int, int]],
    present: frozenset[ObjectKey],
) -> bool:
    """Whether all that the backwards and forwards to come read of a forward's results is there."""
    read = [
        key
        for key in objects.outputs(segment, m)
        if any(r in backwards or (r, m) in forwards for r in objects.model.values[key.name].readers)
    ]
    before = objects.buffers_before(segment, m) if segment.index in backwards else ()
    return present.issuperset((*read, *before))
