"""Which instructions may be under way together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.program.overlap import side_by_side
from swaptrain.program.step import StepBuilder
from tests.program.models import builders


def _program(*parts: tuple[Operation, int, int]) -> list[Instruction]:
    return [Instruction(operation, k, m) for operation, k, m in parts]


def test_what_the_host_may_still_need_is_left_alone() -> None:
    sums = ObjectKey(Kind.ACCUMULATOR, "gradient", 2)
    means = ObjectKey(Kind.STATE, "buffers_float32", 2)
    weights = ObjectKey(Kind.STATE, "weights", 2)
    first = Instruction(Operation.BACKWARD, 2, 0, reads=(weights,), writes=(sums,))
    second = Instruction(Operation.BACKWARD, 2, 1, reads=(weights,), changes=(sums,))
    assert side_by_side(first, second)
    assert side_by_side(Instruction(Operation.UPDATE, 2, changes=(weights,)), first)
    assert not side_by_side(Instruction(Operation.UPDATE, 2, reads=(sums,), frees=(sums,)), first)
    update = Instruction(Operation.UPDATE, 2, reads=(sums,), changes=(weights, means))
    assert side_by_side(second, update)
    assert not side_by_side(second, replace(update, goes_on=True))
    assert not side_by_side(Instruction(Operation.TURN, 2, 0, reads=(weights,)), update)
    assert not side_by_side(Instruction(Operation.FORWARD, 2, 0, changes=(means,)), update)
    assert not side_by_side(Instruction(Operation.UPDATE, 2, goes_on=True), update)
    summed = Instruction(Operation.NORMS, 2, reads=(sums,))
    assert side_by_side(second, summed)
    assert not side_by_side(Instruction(Operation.TURN, 2, 0, changes=(sums,)), summed)
    assert side_by_side(summed, Instruction(Operation.BACKWARD, 1, 0, reads=(weights,)))
    assert not side_by_side(summed, second)
    norm = Instruction(Operation.FORWARD, 2, 0, changes=(means,))
    assert not side_by_side(norm, norm)


@given(builder=builders())
def test_micro_batches_of_a_visit_are_begun_before_the_one_before_has_ended(
    builder: StepBuilder,
) -> None:
    """But where a forward changes buffers."""
    for first, second in pairwise(builder.step()):
        same_visit = first.segment == second.segment and first.operation is second.operation
        buffers = any(key.kind is Kind.STATE for key in (*first.changes, *second.changes))
        if same_visit and first.operation in (Operation.FORWARD, Operation.BACKWARD):
            assert side_by_side(first, second) == (not buffers)
