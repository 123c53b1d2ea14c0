"""The programs of several ranks fit together, and the checks refuse those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaptrain.program.check import ProgramError, check_program, check_ranks
from swaptrain.program.durability import Durability
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.ranks import Ranks
from swaptrain.program.residency import plan_residency
from swaptrain.program.step import StepBuilder
from tests.program.models import builders, chain, evaluating


def size(key: ObjectKey) -> int:
    return 10


def of_ranks(builder: StepBuilder, count: int) -> list[StepBuilder]:
    """Return the builders of all ranks; no buffer changes, which several ranks refuse."""
    segments = tuple(replace(s, buffers=()) for s in builder.model.segments)
    model = replace(builder.model, segments=segments, buffers={})
    arrays = {
        k: [name for name in names if not name.startswith("buffers")]
        for k, names in builder.state_arrays.items()
    }
    return [
        replace(builder, model=model, state_arrays=arrays, ranks=Ranks(rank, count))
        for rank in range(count)
    ]


def finished(builder: StepBuilder) -> list[ObjectKey]:
    """Return the sums that the step before has left."""
    owned = (s for s in builder.model.segments if builder.objects.has_state(s))
    return [key for s in owned for key in builder.objects.sums(s)] if builder.deferred else []


@settings(max_examples=60, deadline=None)
@given(builders(), st.integers(2, 4))
def test_all_that_is_built_fits_together(builder: StepBuilder, count: int) -> None:
    """Every rank's step and evaluation is right by itself, and all exchange the same."""
    every = [evaluating(b) for b in of_ranks(builder, count)]
    pending = [[s.index for s in b.model.segments if b.objects.has_state(s)] for b in every]
    steps = [
        b.step(pending_updates=own if b.deferred else ())
        for b, own in zip(every, pending, strict=True)
    ]
    evaluations = [b.evaluation() for b in every]
    for b, program in zip(every, steps, strict=True):
        check_program(program, size, present=finished(b))
    for program in evaluations:
        check_program(program, size)
    check_ranks(steps)
    check_ranks(evaluations)
    updated = [i.segment for program in steps for i in program if i.operation is Operation.UPDATE]
    stored = [k for k, names in every[0].state_arrays.items() if names]
    assert sorted(set(updated)) == stored
    batches = [i.micro_batch for p in evaluations for i in p if i.operation is Operation.LOAD]
    assert sorted(batches) == list(range(builder.micro_batches + 1))


@settings(max_examples=40, deadline=None)
@given(builders(), st.integers(2, 3))
def test_what_another_rank_has_sent_never_leaves_memory(builder: StepBuilder, count: int) -> None:
    """A plan for the least memory evicts other things, and writes none of it."""
    for own in of_ranks(builder, count):
        program = own.step(pending_updates=())
        least = check_program(program, size).instruction_bytes
        durability = Durability(program, unit="nothing")
        plan = plan_residency(program, (), size, least, durability=durability, held={})
        shared = [k for i in program for k in i.writes if k.kind is Kind.SHARED]
        assert not any(key in plan._evictions for key in shared)


def test_one_rank_exchanges_nothing() -> None:
    """The program of one process is the one that it was."""
    assert not any(instruction.is_exchange for instruction in chain(3, 2).step())


def _without(operation: Operation) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        at = next(i for i, x in enumerate(program) if x.operation is operation)
        return (*program[:at], *program[at + 1 :])

    return change


def _collect_first(program: Program) -> Program:
    """Bring sums together before the last backward has added to them."""
    at = next(i for i, x in enumerate(program) if x.operation is Operation.COLLECT)
    swapped = list(program)
    swapped[at - 1], swapped[at] = swapped[at], swapped[at - 1]
    return tuple(swapped)


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (0, _without(Operation.SHARE), "does not exist then"),
        (1, _without(Operation.COLLECT), "uses the sums of one rank"),
        (1, _collect_first, "brought together before"),
    ],
)
def test_a_broken_program_is_refused(
    rank: int, change: Callable[[Program], Program], words: str
) -> None:
    """Of the rank that owns the first and the last segment, or of the other one."""
    builder = of_ranks(chain(3, 2), 2)[rank]
    check_program(builder.step(), size)
    with pytest.raises(ProgramError, match=words):
        check_program(change(builder.step()), size)


def test_ranks_that_exchange_otherwise_are_refused() -> None:
    """Fewer, in another order, or with two owners."""
    zeroth, first = (b.step() for b in of_ranks(chain(3, 2), 2))
    check_ranks([zeroth, first])
    with pytest.raises(ProgramError, match="unequally often"):
        check_ranks([zeroth, _without(Operation.SHARE)(first)])
    with pytest.raises(ProgramError, match="own"):
        check_ranks([zeroth, zeroth])
    shares = [i for i, x in enumerate(first) if x.operation is Operation.SHARE]
    other: list[Instruction] = list(first)
    other[shares[0]], other[shares[1]] = other[shares[1]], other[shares[0]]
    with pytest.raises(ProgramError, match="meets another"):
        check_ranks([zeroth, tuple(other)])
