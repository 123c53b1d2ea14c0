"""A step that was begun runs only the forwards whose results are missing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swaptrain.program.check import check_program
from swaptrain.program.double_buffer import buffer_index
from swaptrain.program.forwards import recoverable
from swaptrain.program.instructions import Kind, ObjectKey, Operation, Program
from swaptrain.program.step import StepBuilder
from tests.program.models import builders


def size(key: ObjectKey) -> int:
    return 10


def forwards(program: Program) -> set[tuple[int, int]]:
    return {(i.segment, i.micro_batch) for i in program if i.operation is Operation.FORWARD}


def updates(builder: StepBuilder) -> list[int]:
    return [k for k, arrays in builder.state_arrays.items() if arrays]


def sums(builder: StepBuilder) -> list[ObjectKey]:
    keys = (key for s in builder.model.segments for key in builder.objects.sums(s))
    return list(keys)


@settings(max_examples=200, deadline=None)
@given(builder=builders(), data=st.data())
def test_whatever_is_there_the_rest_of_the_step_is_whole(
    builder: StepBuilder, data: st.DataObject
) -> None:
    """With any part of a step's values on the disk, what is left reads nothing that is missing."""
    pending = data.draw(st.sampled_from([[], updates(builder)])) if builder.deferred else []
    whole = builder.step(pending_updates=pending)
    candidates = recoverable(whole)
    present = set(data.draw(st.lists(st.sampled_from(candidates)))) if candidates else set()
    rest = builder.step(pending_updates=pending, present=present)
    spared = forwards(whole) - forwards(rest)
    made = {key for i in rest for key in i.writes}
    values = {key for key in present if key.kind is Kind.VALUE} - made
    finished = sums(builder) if pending else []
    check_program(rest, size, present=[*values, *finished], forwarded=spared)
    for segment in builder.model.segments:
        if segment.buffers:  # all or none: each starts from what the one before left
            ran = {m for k, m in forwards(rest) if k == segment.index}
            assert ran in (set(), {m for k, m in forwards(whole) if k == segment.index})


@settings(max_examples=100, deadline=None)
@given(builder=builders())
def test_with_everything_there_no_forward_is_run(builder: StepBuilder) -> None:
    """But those of segments with buffers whose update of the step before is to be done."""
    whole = builder.step()
    assert not forwards(builder.step(present=recoverable(whole)))
    with_buffers = {s.index for s in builder.model.segments if s.buffers}
    pending = builder.step(pending_updates=updates(builder), present=recoverable(whole))
    assert {k for k, _ in forwards(pending)} == with_buffers - {len(builder.model.segments)}


@settings(max_examples=100, deadline=None)
@given(builder=builders())
def test_a_gradient_never_overwrites_one_that_a_commit_named(builder: StepBuilder) -> None:
    """From one commit to the next nothing is written to the row of a gradient that it hands on."""
    live: set[ObjectKey] = set()
    named: set[tuple[str, int, int]] = set()
    for instruction in builder.step():
        made = {key for key in instruction.writes if key.kind is Kind.GRADIENT}
        for key in made:
            assert (key.name, key.micro_batch, buffer_index(builder.model, key)) not in named
        live |= made
        live -= set(instruction.frees)
        if instruction.operation in (Operation.UPDATE, Operation.NORMS):
            named = {(k.name, k.micro_batch, buffer_index(builder.model, k)) for k in live}
