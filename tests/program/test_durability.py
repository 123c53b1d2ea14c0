"""What a step makes durable, and which instructions wait for the commits before them."""

from __future__ import annotations

from hypothesis import given

from swaptrain.program.durability import Durability, barriers
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.program.step import StepBuilder
from tests.program.models import builders
from tests.protocol.counting import waiting


def _program(*parts: tuple[Operation, int, int]) -> list[Instruction]:
    return [Instruction(operation, k, m) for operation, k, m in parts]


def test_the_first_of_a_visit_is_a_barrier_or_the_one_that_ends_a_backward() -> None:
    """A batch is no segment's; an update in a forward stands for the whole visit."""
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
        (Operation.NORMS, 1, -1),
    )
    assert barriers(program, lag=1) == {1, 3, 5, 8, 10}
    assert barriers(program, lag=2) == {1, 3, 7, 9, 12}


@given(builder=builders())
def test_each_visit_has_one_barrier(builder: StepBuilder) -> None:
    """Before its own segment is committed, whatever is allowed to be done again."""
    program = builder.step()
    for lag in (1, 2):
        positions = barriers(program, lag=lag)
        segment, passed = 0, True
        for position, instruction in enumerate(program):
            if instruction.segment not in (0, segment):
                assert passed
                segment, passed = instruction.segment, False
            if position in positions:
                assert not passed
                passed = True
            if instruction.operation in (Operation.UPDATE, Operation.NORMS):
                assert passed
        assert passed


@given(builder=builders())
def test_a_record_names_the_gradients_that_the_rest_of_the_step_needs(builder: StepBuilder) -> None:
    """Each of them is written once, with the first commit at which it is alive."""
    program = builder.step()
    durability = Durability(program)
    written: list[ObjectKey] = []
    for position, instruction in enumerate(program):
        made = durability.made(position)
        written += made.handed_on
        if made.written and not instruction.goes_on:
            assert set(made.alive) == taken_over(program[position + 1 :])
            assert set(made.alive) <= set(written)
    assert len(written) == len(set(written))


@given(builder=builders())
def test_a_resumed_step_takes_over_what_the_record_named(builder: StepBuilder) -> None:
    """So its own records name those gradients too, and none of them is written again."""
    program = builder.step()
    durability = Durability(program)
    for position, instruction in enumerate(program):
        if instruction.operation not in (Operation.UPDATE, Operation.NORMS) or builder.deferred:
            continue
        rest = program[position + 1 :]
        resumed = Durability(rest)
        for later in range(len(rest)):
            before, after = durability.made(position + 1 + later), resumed.made(later)
            assert after.objects == before.objects
            assert set(after.alive) == set(before.alive)
            assert not set(after.handed_on) & set(durability.made(position).alive)
        break


@given(builder=builders())
def test_where_the_store_is_committed_as_a_whole_only_state_is_written(
    builder: StepBuilder,
) -> None:
    """All of it, at no barrier, and memory is planned as if it stayed dirty."""
    program = builder.step()
    durability = Durability(program, unit="step")
    written = [key for position in range(len(program)) for key in durability.made(position).written]
    new = [key for i in program if i.operation is Operation.UPDATE for key in i.new_state]
    assert written == new
    assert not durability.barriers and not durability.visits
    assert not any(durability.planned(position) for position in range(len(program)))


@given(builder=builders())
def test_kept_activations_are_written_once(builder: StepBuilder) -> None:
    """Each value that a forward makes, and the buffers after the last micro-batch."""
    program = builder.step()
    durability = Durability(program, program, keeps_activations=True)
    plain = Durability(program, program)
    for position, instruction in enumerate(program):
        made = durability.made(position).objects
        if instruction.operation is not Operation.FORWARD:
            assert made == plain.made(position).objects
            continue
        assert plain.made(position).objects == ()
        values = [key for key in made if key.kind is Kind.VALUE]
        assert values == [key for key in instruction.writes if key.kind is Kind.VALUE]
        buffers = {key for key in instruction.changes if key.kind is Kind.STATE}
        last = instruction.micro_batch == builder.micro_batches - 1
        assert set(made) - set(values) == (buffers if last else set())


def taken_over(program: tuple[Instruction, ...]) -> set[ObjectKey]:
    """Return the gradients that a program reads and does not make."""
    made: set[ObjectKey] = set()
    found: set[ObjectKey] = set()
    for instruction in program:
        found |= {k for k in instruction.needs if k.kind is Kind.GRADIENT and k not in made}
        made |= set(instruction.writes)
    return found


@given(builder=builders())
def test_the_barriers_are_those_of_the_protocol(builder: StepBuilder) -> None:
    """The check of the protocol states them by itself."""
    program = builder.step()
    for lag in (1, 2):
        assert barriers(program, lag=lag) == waiting(program, lag=lag)
