"""The instruction that brings all ranks the weights of a segment."""

from __future__ import annotations

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.program.model import SegmentSpec
from swaptrain.program.objects import Objects

__all__ = ["exchanged", "share"]


def share(segment: SegmentSpec, objects: Objects, *, graph: int = 0) -> Instruction | None:
    """Return what goes before a visit of a segment, or of a slice of an evaluation.

    None where there is one rank, or nothing to bring. Who owns an array reads it, the others write
    what it sends.
    """
    keys = objects.weights(segment)
    if objects.ranks.count == 1 or not keys:
        return None
    return Instruction(
        Operation.SHARE,
        segment.index,
        graph=graph,
        reads=tuple(key for key in keys if key.kind is Kind.STATE),
        writes=tuple(key for key in keys if key.kind is Kind.SHARED),
    )


def exchanged(instruction: Instruction) -> list[ObjectKey]:
    """Return what an exchange sends or gets, in the order in which all ranks go through it."""
    return sorted(instruction.touches, key=lambda key: (key.segment, key.name))
