"""Rehearsals: what the tier would do, in seconds that can be reckoned by hand."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaptrain.memory.slab import PAGE_BYTES
from swaptrain.planning.simulation import Rehearsal, Room
from swaptrain.program.cost import Disk
from swaptrain.program.durability import Durability
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.residency import planned_bytes
from tests.program.models import chain, chain_size, size_of
from tests.support.traffic import durable_objects, simulate

PARAMETERS = 1 << 16
SPEED = Disk(1e9, 1e9, 1e9)


def sweep(count: int) -> Program:
    """Return a program that reads `count` arrays of a page, one after the other."""
    keys = [ObjectKey(Kind.STATE, "weights", k) for k in range(1, count + 1)]
    return tuple(Instruction(Operation.FORWARD, key.segment, 0, reads=(key,)) for key in keys)


def rehearsed(program: Program, pool_pages: int, seconds: float, work_s: float = 0.0) -> float:
    """Return the seconds of a warm round."""
    page_s = Disk(PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)  # a page takes a second
    rehearsal = Rehearsal(
        lambda _: PAGE_BYTES,
        Room(pool_pages * PAGE_BYTES),
        seconds=lambda _: seconds,
        disk=page_s,
        work=lambda *_: work_s,
    )
    for _ in range(3):
        done = rehearsal.run(program, program, Durability(program, program, unit="nothing"))
    return done.seconds


def test_the_slower_of_disk_and_processor_decides() -> None:
    """Ten pages through room for four: eight or so are read, behind what is computed."""
    program = sweep(10)
    assert rehearsed(program, 40, 3.0) == pytest.approx(30)  # all is in memory
    assert rehearsed(program, 4, 3.0) == pytest.approx(30)  # the disk is hidden
    slow = rehearsed(program, 4, 0.01)
    assert 6 <= slow <= 10.1  # the disk decides; what is cached is not read
    # Each page that is read beside it takes half a second from computing.
    assert 30 + 0.5 * 6 <= rehearsed(program, 4, 3.0, work_s=0.5) <= 30 + 0.5 * 10
    assert rehearsed(program, 40, 3.0, work_s=0.5) == pytest.approx(30)  # none is read
    # What waits for the disk computes as fast as before: the processor has the time for both,
    assert rehearsed(program, 4, 0.01, work_s=0.5) == pytest.approx(slow, abs=0.6)
    # but no more time than the wait has: eight reads or so are 40 seconds of a processor.
    assert 6 * 5 <= rehearsed(program, 4, 0.01, work_s=5.0) <= 10 * 5 + 1


def test_the_next_forward_waits_for_the_last_commit() -> None:
    """As in a run: the first segment's commit has the time of its forward in the step after."""
    weights = ObjectKey(Kind.STATE, "weights", 1)
    program = (
        Instruction(Operation.FORWARD, 1, 0, reads=(weights,)),
        Instruction(Operation.UPDATE, 1, changes=(weights,)),
        Instruction(Operation.FORWARD, 2, 0),
    )
    page_s = Disk(PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    half = Rehearsal(
        lambda _: PAGE_BYTES, Room(40 * PAGE_BYTES), seconds=lambda _: 0.25, disk=page_s
    )

    # The forward of the second segment waits for the commit of the first: 0.25 and 0.25, then 1.
    assert half.run(
        program, program[:2], Durability(program, program[:2])
    ).seconds == pytest.approx(1 + 1.5)
    # Here nothing comes between commit and forward, which has 0.25 of its second.
    ends_with_commit = program[:2]
    durability = Durability(ends_with_commit, ends_with_commit)
    first = half.run(ends_with_commit, ends_with_commit, durability).seconds
    assert first == pytest.approx(0.5)
    assert half.run(ends_with_commit, ends_with_commit, durability).seconds == pytest.approx(1.25)


@pytest.mark.parametrize("room", [2.5, 3, 3.5])
def test_what_an_update_reads_comes_while_the_backward_before_it_runs(room: float) -> None:
    """Where memory holds a few segments, and a disk reads an update's state in 9/10 of that."""
    program = chain(12, 1, elements=PARAMETERS).step()
    size = partial(size_of, chain_size(PARAMETERS, 8192))
    most = max(sum(size(key) for key in set(i.touches)) for i in program)
    update_bytes = 10 * PARAMETERS
    disk = Disk(update_bytes / 0.0075, 1e12, update_bytes / 0.009)
    rehearsal = Rehearsal(
        size,
        Room(int(most * room)),
        seconds=lambda i: 0.01 if i.segment else 0.0,
        disk=disk,
    )
    took = [rehearsal.run(program, program, Durability(program, program)) for _ in range(3)][-1]
    computing_s = 0.01 * sum(1 for i in program if i.segment)
    assert took.traffic.read_bytes > 11 * update_bytes
    assert took.seconds < 1.01 * computing_s


@pytest.mark.parametrize("room", [2.5, 3])
def test_what_changes_between_commits_is_written_beside_the_next_backward(room: float) -> None:
    """Nothing waits for the room that it takes, where the disk has the time."""
    program = chain(12, 1, elements=PARAMETERS).step()
    size = partial(size_of, chain_size(PARAMETERS, 8192))
    most = max(sum(size(key) for key in set(i.touches)) for i in program)
    byte_s = 0.009 / (22 * PARAMETERS)  # an update's bytes, both ways, in 9/10 of a backward
    computing = [i for i in program if i.segment and i.operation is not Operation.UPDATE]
    rehearsal = Rehearsal(
        size,
        Room(int(most * room)),
        seconds=lambda i: 0.01 if i in computing else 0.0,
        disk=Disk(1 / byte_s, 1 / byte_s, 1 / byte_s),
    )
    took = [
        rehearsal.run(program, program, Durability(program, program, unit="nothing"))
        for _ in range(3)
    ][-1]
    assert took.traffic.write_bytes > 10 * 10 * PARAMETERS
    assert took.seconds == pytest.approx(0.01 * len(computing), rel=1e-3)


def test_a_commit_may_have_all_of_the_next_segments_backward() -> None:
    """Where the disk takes as long as the processor a step is shorter then, with the same bytes."""
    program = chain(8, 4).step()
    size = partial(size_of, chain_size(PARAMETERS, 8192))
    durable = durable_objects(program)
    byte_s = 0.015 * 32 / sum(size(key) for i in program for key in durable(i))
    disk = Disk(1 / byte_s, 1 / byte_s, 1 / byte_s)
    took = {}
    for lag in (1, 2):
        rehearsal = Rehearsal(
            size,
            Room(1 << 40),
            seconds=lambda i: 0.01 if i.segment else 0.0,
            disk=disk,
        )
        durability = Durability(program, program, lag=lag)
        took[lag] = [rehearsal.run(program, program, durability) for _ in range(3)][-1]
    assert took[2].traffic == took[1].traffic
    assert took[2].seconds < 0.95 * took[1].seconds


@given(
    segments=st.integers(3, 8),
    room=st.floats(1.2, 6),
    compute_ms=st.sampled_from([0.01, 1.0, 100.0]),
    work_ms=st.sampled_from([0.0, 0.01, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_no_read_is_repeated_and_nothing_is_for_free(
    segments: int, room: float, compute_ms: float, work_ms: float
) -> None:
    """It reads what the plan reads: what was fetched ahead stays until it is used.

    And a step takes as long as its computing and as its bytes, and no longer than both together,
    with what the requests cost the processor.
    """
    program = chain(segments, 1).step()
    size = partial(size_of, chain_size(PARAMETERS, 8192))
    most = max(sum(size(key) for key in set(i.touches)) for i in program)
    pool = int(most * room)
    durable = durable_objects(program)
    works = []

    def work(*_: object) -> float:
        works.append(work_ms / 1e3)
        return works[-1]

    rehearsal = Rehearsal(
        size,
        Room(pool),
        seconds=lambda i: compute_ms / 1e3 if i.segment else 0.0,
        disk=SPEED,
        work=work,
    )
    done = [rehearsal.run(program, program, Durability(program, program)) for _ in range(4)]
    planned = simulate(program, size, planned_bytes(program, size, pool), durable=durable, rounds=4)
    read = sum(step.traffic.read_bytes for step in done[2:]) / 2
    assert read <= 1.1 * planned.read_bytes + 2 * most
    assert done[-1].traffic.commit_bytes == planned.commit_bytes
    compute_s = compute_ms / 1e3 * sum(bool(i.segment) for i in program)
    io_s = done[-1].traffic.total_bytes / 1e9
    assert compute_s <= done[-1].seconds + 1e-9
    together = sum(step.seconds for step in done[2:])
    moved = sum(step.traffic.total_bytes for step in done[1:]) / 1e9
    assert together <= 2 * compute_s + moved + io_s + sum(works)
    # The processor never does more than one thing at a time.
    queues = rehearsal._disk.queues.values()
    left = sum(r.left_bytes * r.work_byte_s for queue in queues for r in queue)
    assert 4 * compute_s + sum(works) <= sum(step.seconds for step in done) + left + 1e-3


@given(
    segments=st.integers(3, 8),
    micro_batches=st.integers(1, 5),
    room=st.floats(1.1, 5),
    value_bytes=st.sampled_from([8192, 1 << 17, 1 << 19]),
    speed=st.sampled_from([1e7, 1e8, 1e9]),
)
@settings(max_examples=40, deadline=None)
def test_up_to_what_is_missing_only_positions_that_the_plan_reads_for_decide(
    segments: int, micro_batches: int, room: float, value_bytes: int, speed: float
) -> None:
    """What is read ahead is the same where every position is looked at."""
    program = chain(segments, micro_batches).step()
    size = partial(size_of, chain_size(PARAMETERS, value_bytes))
    most = max(sum(size(key) for key in set(i.touches)) for i in program)
    found = []
    for every in (False, True):
        rehearsal = Rehearsal(
            size,
            Room(int(most * room)),
            seconds=lambda i: 0.01 if i.segment else 0.0,
            disk=Disk(speed, speed, speed),
        )
        if every:  # walks through all positions
            rehearsal._tier._first_missing = lambda at: at + 1  # type: ignore[method-assign]
        done = [rehearsal.run(program, program, Durability(program, program)) for _ in range(2)]
        found.append((done, rehearsal._tier.resident()))
    assert found[0] == found[1]
