"""Which instructions wait for the commits before them."""

from __future__ import annotations

from hypothesis import given

from swaptrain.program.instructions import Instruction, Operation
from swaptrain.program.step import StepBuilder
from swaptrain.program.turns import settling
from tests.program.models import builders


def _program(*turns: tuple[Operation, int, int]) -> list[Instruction]:
    return [Instruction(operation, k, m) for operation, k, m in turns]


def test_the_first_of_a_turn_settles_or_the_one_that_ends_a_backward() -> None:
    """A batch is no segment's; an update in a forward stands for the whole turn."""
    program = _program(
        (Operation.LOAD, 0, 0),
        (Operation.FORWARD, 1, 0),
        (Operation.FORWARD, 1, 1),
        (Operation.UPDATE, 2, -1),
        (Operation.FORWARD, 2, 0),
        (Operation.TURN, 3, 0),
        (Operation.TURN, 3, 1),
        (Operation.UPDATE, 3, -1),
        (Operation.BACKWARD, 2, 0),
        (Operation.BACKWARD, 2, 1),
        (Operation.BACKWARD, 1, 0),
        (Operation.BACKWARD, 1, 1),
        (Operation.SETTLE, 1, -1),
    )
    assert settling(program, repeats=1) == {1, 3, 5, 8, 10}
    assert settling(program, repeats=2) == {1, 3, 7, 9, 12}


@given(builder=builders())
def test_each_turn_settles_once(builder: StepBuilder) -> None:
    """Before its own segment is committed, whatever is allowed to be done again."""
    program = builder.step()
    for repeats in (1, 2):
        positions = settling(program, repeats=repeats)
        segment, settled = 0, True
        for position, instruction in enumerate(program):
            if instruction.segment not in (0, segment):
                assert settled
                segment, settled = instruction.segment, False
            if position in positions:
                assert not settled
                settled = True
            if instruction.operation in (Operation.UPDATE, Operation.SETTLE):
                assert settled
        assert settled
