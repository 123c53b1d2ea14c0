"""Says where a run goes on."""

from __future__ import annotations

from collections.abc import Collection

from swaptrain.program.instructions import Kind, ObjectKey, Operation, Program

__all__ = ["going_on"]


def going_on(
    program: Program, step: int, found: Collection[ObjectKey], *, top: int | None, segments: int
) -> str:
    """Return one line: step, segment, and how many forwards are done again.

    `program` is what is left of the step, `found` what an earlier process left of its forwards,
    `top` the segment whose backward comes next, if the step was killed in its backward.
    """
    left = [(i.segment, i.micro_batch) for i in program if i.operation is Operation.FORWARD]
    if top is not None:
        return (
            f"going on in step {step} with the backward of segment {top}/{segments}; "
            f"forwards done again: {len(left)}"
        )
    reached = max((key.segment for key in found if key.kind is Kind.VALUE), default=0)
    if not reached:
        return f"going on with step {step}"
    begun = {(key.segment, key.micro_batch) for key in found}
    again = sum(1 for segment, m in left if segment < reached or (segment, m) in begun)
    following = f"forward of segment {left[0][0]}" if left else f"backward of segment {segments}"
    return f"going on in step {step} with the {following}/{segments}; forwards done again: {again}"
