"""What is evicted, and that the simulated traffic is the design's formula."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaptrain.program.check import check_program
from swaptrain.program.durability import Durability
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.program.residency import (
    NextUse,
    choose_victim,
    plan_residency,
    planned_bytes,
    victim_score,
)
from tests.program.models import chain, chain_size, size_of
from tests.support.traffic import simulate


def reads(*names: str) -> Instruction:
    return Instruction(Operation.FORWARD, 1, reads=tuple(key(name) for name in names))


def key(name: str) -> ObjectKey:
    return ObjectKey(Kind.VALUE, name, 1)


def durable(instruction: Instruction) -> Iterable[ObjectKey]:
    """A commit after every update: all of a segment's state."""
    if instruction.operation is Operation.UPDATE:
        return [k for k in instruction.changes if k.kind is Kind.STATE]
    return []


def least_traffic_bytes(parameters: int, boundary_bytes: int, cache_bytes: int) -> int:
    """T_min of docs/design.md for commit_every 1; what is left of the cache holds values."""
    weights = min(cache_bytes, 2 * parameters)
    others = max(0, min(cache_bytes, 12 * parameters) - 2 * parameters)
    values = min(boundary_bytes, max(0, cache_bytes))
    return 26 * parameters - 2 * weights - others + 2 * (boundary_bytes - values)


def test_the_furthest_next_use_is_evicted() -> None:
    """Belady's choice among clean objects; what is never used again goes first."""
    uses = NextUse([reads("now"), reads("near"), reads("far")])
    candidates = [(key(name), uses.after(key(name), 0), False) for name in ("near", "far")]
    assert choose_victim(candidates, 0) == key("far")
    candidates.append((key("never"), uses.after(key("never"), 0), False))
    assert choose_victim(candidates, 0) == key("never")
    assert choose_victim([], 0) is None


def test_a_dirty_object_has_to_be_twice_as_far() -> None:
    """Evicting it costs a write and a read, a clean one a read alone."""
    assert choose_victim([(key("clean"), 2, False), (key("dirty"), 4, True)], 0) == key("clean")
    assert choose_victim([(key("clean"), 2, False), (key("dirty"), 5, True)], 0) == key("dirty")
    assert victim_score(6, dirty=True) == victim_score(3, dirty=False)


def test_the_next_use_is_after_the_position() -> None:
    """The use by the current instruction does not count."""
    uses = NextUse([reads("a"), reads("a"), reads("b"), reads("a")])
    assert [uses.after(key("a"), i) for i in range(3)] == [1, 3, 3]
    assert uses.after(key("a"), 3) > 1 << 32


def test_what_the_plan_can_spare() -> None:
    """A sweep of three through room for two: the one just used goes, not the one that waits."""
    sweep = tuple(reads(name) for name in "abc")
    plan = plan_residency(
        sweep, sweep, lambda _: 1, 2, durability=Durability(sweep, sweep), held={}
    )
    assert plan.spares(key("b"), 0)  # if it was fetched ahead: the plan does not count on it
    assert plan.spares(key("b"), 1)
    assert key("b") in plan.reads[4]
    assert not plan.spares(key("a"), 1)  # stays for its next use
    assert key("a") not in plan.reads[3]
    assert plan.used_bytes == [1, 2, 2, 2, 2, 2]  # what is spared is replaced at once
    assert plan.held_after == {key("a"): False, key("c"): False}
    again = plan_residency(
        sweep, (), lambda _: 1, 2, durability=Durability(sweep), held=plan.held_after
    )
    assert key("a") not in again.reads[0]
    assert again.spares(key("b"), 0)


@pytest.mark.parametrize("value_bytes", [0, 8192, 1 << 16])
def test_without_a_cache_a_step_moves_26_bytes_per_parameter_and_2_per_boundary_byte(
    value_bytes: int,
) -> None:
    """24 equal segments in the smallest pool that keeps the gradient handed on during an update.

    26 P + 2 K, within what the cache of one segment saves.
    """
    segments, p = 24, 10_000
    builder = chain(segments, 1)
    size = partial(size_of, chain_size(p, value_bytes))
    program = builder.step()
    pool = check_program(program, size).instruction_bytes + 2 * value_bytes
    traffic = simulate(program, size, pool, durable=durable, rounds=3)
    expected = 26 * segments * p + 2 * (segments - 1) * value_bytes
    # One segment is still there when the step turns round, or begins anew.
    assert expected - 16 * p - 8 * value_bytes <= traffic.total_bytes <= expected
    assert traffic.commit_bytes == 12 * segments * p


def test_with_room_for_everything_only_commits_are_written() -> None:
    """Nothing is read, and 12 bytes per parameter are written."""
    builder = chain(6, 3)
    traffic = simulate(
        builder.step(), partial(size_of, chain_size(100, 50)), 1 << 40, durable=durable
    )
    assert (traffic.read_bytes, traffic.write_bytes) == (0, 12 * 600)


def test_what_the_next_instruction_reads_has_room_beside_the_plan() -> None:
    """Remainder and moments of an update, or a tenth: also where nothing has to be read at all."""
    size = partial(size_of, chain_size(1000, 50))
    program = chain(12, 1).step()
    assert planned_bytes(program, size, 70_000) == 70_000 - 10 * 1000
    assert planned_bytes(program, size, 120_000) == 120_000 - 12_000
    largest = 16 * 1000  # an update and its gradient
    assert planned_bytes(program, size, largest + 8000) == largest + 4000
    few = chain(2, 1).step()
    whole = 2 * 12 * 1000 + 4 * 1000 + 4 * 50
    fits = whole * 10 // 9 + 2
    assert planned_bytes(few, size, fits) == fits - fits // 10
    read = simulate(few, size, planned_bytes(few, size, fits), durable=durable).read_bytes
    assert read == 0


@settings(max_examples=60, deadline=None)
@given(
    segments=st.integers(2, 12),
    share=st.floats(0, 1.2),
    value_bytes=st.integers(0, 20_000),
)
def test_no_pool_beats_the_lower_bound(segments: int, share: float, value_bytes: int) -> None:
    """The simulated traffic is never below T_min, with the whole pool taken for its cache."""
    p = 1000
    builder = chain(segments, 1)
    size = partial(size_of, chain_size(p, value_bytes))
    program = builder.step()
    least = check_program(program, size).instruction_bytes
    pool = max(least, int(share * segments * (16 * p + 2 * value_bytes)))
    traffic = simulate(program, size, pool, durable=durable, rounds=3)
    boundary = (segments - 1) * value_bytes
    assert traffic.total_bytes >= least_traffic_bytes(segments * p, boundary, pool)
    assert traffic.write_bytes >= 12 * segments * p
