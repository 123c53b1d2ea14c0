"""The checker refuses every kind of broken program and passes all that the builder makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from swaptrain.program.check import ProgramError, check_program
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.step import StepBuilder
from tests.program.models import builders, chain, evaluating


def size(key: ObjectKey) -> int:
    return 10


GOOD: Program = chain(3, 2).step()


def where(operation: Operation, segment: int, micro_batch: int = -1) -> int:
    return next(
        i
        for i, x in enumerate(GOOD)
        if (x.operation, x.segment, x.micro_batch) == (operation, segment, micro_batch)
    )


def swapped(i: int, j: int) -> Program:
    program = list(GOOD)
    program[i], program[j] = program[j], program[i]
    return tuple(program)


def test_the_unbroken_program_passes() -> None:
    """The program that the following tests break is good."""
    assert check_program(GOOD, size).instruction_bytes > 0


def test_a_read_before_the_write_is_refused() -> None:
    """A forward before the one that makes its input."""
    first, second = where(Operation.FORWARD, 1, 0), where(Operation.FORWARD, 2, 0)
    with pytest.raises(ProgramError, match="does not exist then"):
        check_program(swapped(first, second), size)


def test_a_missing_load_is_refused() -> None:
    """A batch that nobody brings."""
    with pytest.raises(ProgramError, match="needs value/000/batch"):
        check_program(GOOD[1:], size)


def test_a_read_after_the_last_use_is_refused() -> None:
    """An object that was freed too early."""
    i = where(Operation.FORWARD, 2, 0)
    early = replace(GOOD[i], frees=GOOD[i].reads[-1:])
    with pytest.raises(ProgramError, match="does not exist then"):
        check_program((*GOOD[:i], early, *GOOD[i + 1 :]), size)


def test_a_second_fresh_write_is_refused() -> None:
    """An instruction that is done twice."""
    i = where(Operation.FORWARD, 1, 0)
    with pytest.raises(ProgramError, match="a second time"):
        check_program((*GOOD[: i + 1], *GOOD[i:]), size)


def test_a_backward_without_its_forward_is_refused() -> None:
    """A backward of a micro-batch that did not pass the segment."""
    lonely = Instruction(Operation.BACKWARD, 1, 0)
    with pytest.raises(ProgramError, match="before its forward"):
        check_program((lonely,), size)


@pytest.mark.parametrize("segment", [1, 3])
def test_an_update_between_backwards_is_refused(segment: int) -> None:
    """Updated weights must not be read again in the step, in a backward or in a turn."""
    update = where(Operation.UPDATE, segment)
    operation = Operation.TURN if segment == 3 else Operation.BACKWARD
    early = replace(GOOD[update], frees=())
    i = where(operation, segment, 1)
    with pytest.raises(ProgramError, match="updated before"):
        check_program((*GOOD[:i], early, *GOOD[i:]), size)


def test_an_instruction_larger_than_the_pool_is_refused() -> None:
    """The least pool is the reported peak, and not a byte less."""
    peak = check_program(GOOD, size).instruction_bytes
    check_program(GOOD, size, pool_bytes=peak)
    with pytest.raises(ProgramError, match=f"needs {peak} bytes"):
        check_program(GOOD, size, pool_bytes=peak - 1)


def accumulators(program: Program) -> set[ObjectKey]:
    return {k for i in program for k in i.touches if k.kind is Kind.ACCUMULATOR}


@settings(max_examples=150, deadline=None)
@given(builder=builders())
def test_every_step_passes(builder: StepBuilder) -> None:
    """Fused and deferred, over skips, tied and frozen parameters and buffers."""
    program = builder.step()
    peaks = check_program(program, size)
    touched = max(len(set(i.touches)) for i in program)
    assert peaks.instruction_bytes == 10 * touched
    finished = accumulators(program)
    updates = [k for k, arrays in builder.state_arrays.items() if arrays]
    if builder.deferred:
        check_program(builder.step(pending_updates=updates), size, present=finished)
        check_program(builder.flush(updates), size, present=finished)
    evaluated = evaluating(builder)
    check_program(evaluated.evaluation(), size)
    loaded = [i.micro_batch for i in evaluated.evaluation() if i.operation is Operation.LOAD]
    assert loaded == list(range(builder.micro_batches + 1))


@settings(max_examples=150, deadline=None)
@given(builder=builders())
def test_a_step_leaves_nothing_behind(builder: StepBuilder) -> None:
    """Whatever a step makes it frees exactly once, but for accumulators that wait for an update."""
    alive: set[ObjectKey] = set()
    program = builder.step()
    for instruction in program:
        alive.update(instruction.writes)
        for key in instruction.frees:
            alive.remove(key)
    assert alive == (accumulators(program) if builder.deferred else set())


@settings(max_examples=150, deadline=None)
@given(builder=builders(deferred=False))
def test_a_resumed_step_passes_with_the_hand_off_alone(builder: StepBuilder) -> None:
    """From each commit of a step on, the gradients alive then are all that is needed."""
    alive: set[ObjectKey] = set()
    program = builder.step()
    for instruction in program:
        alive.update(instruction.writes)
        alive.difference_update(instruction.frees)
        done = instruction.operation is Operation.UPDATE and not instruction.goes_on
        if done and instruction.segment > 1:
            handoff = {key for key in alive if key.kind is Kind.GRADIENT}
            rest = builder.step(top=instruction.segment - 1)
            check_program(rest, size, present=handoff)
            later = program[program.index(instruction) + 1 :]
            remaining = [(i.operation, i.segment) for i in later if i.segment]
            assert [(o, k) for o, k in remaining if o is Operation.UPDATE] == [
                (i.operation, i.segment) for i in rest if i.operation is Operation.UPDATE
            ]


@settings(max_examples=100, deadline=None)
@given(builder=builders())
def test_each_segment_sees_each_micro_batch_once_in_order(builder: StepBuilder) -> None:
    """Backwards of a segment run over the micro-batches in ascending order: sums depend on it.

    The backward stops where nothing below learns.
    """
    for segment in builder.model.segments:
        backwards = [
            i.micro_batch
            for i in builder.step()
            if i.segment == segment.index and i.operation in (Operation.BACKWARD, Operation.TURN)
        ]
        reads = [builder.model.parameters[name].trainable for name in segment.parameters]
        below = [builder.model.values[name].gradient for name in segment.inputs]
        assert backwards == list(range(builder.micro_batches if any(reads + below) else 0))
