"""The RAM tier under a disk that answers late, out of order, or not at all."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import PAGE_BYTES, PoolExhausted
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Kind, ObjectKey
from tests.support.late_backing import (
    PAGES,
    STATES,
    VALUES,
    LateBacking,
    one,
    tier_of,
    waits_complete,
)
from tests.support.traffic import simulate


def test_an_error_of_a_read_reaches_the_main_line() -> None:
    """A read that fails raises its own error where the object is acquired."""
    tier, backing, _ = tier_of(4)
    backing.failure = OSError("flipped")
    with waits_complete(backing), pytest.raises(OSError, match="flipped"):
        tier.acquire(one(reads=(STATES[0],)), 0)


def test_an_error_of_a_write_reaches_the_main_line_and_the_object_stays() -> None:
    """A spill that fails raises, again at every later call, and its object stays in memory."""
    tier, backing, _ = tier_of(PAGES[VALUES[0]])
    write, other = one(writes=(VALUES[0],)), one(reads=(STATES[0],))
    tier.follow((write, other, one(reads=(VALUES[0],))))
    with waits_complete(backing):
        tier.acquire(write, 0)[VALUES[0]].memory[:1] = b"x"
        tier.release(write)
        tier.write_behind(0)
        backing.failure = OSError("disk full")
        backing.complete(0)
        for _ in range(2):
            with pytest.raises(OSError, match="disk full"):
                tier.drain()
            with pytest.raises(OSError, match="disk full"):
                tier.acquire(one(reads=(STATES[0],)), 0)
    assert VALUES[0] in tier.resident()
    assert bytes(tier.in_memory(VALUES[0]).memory[:1]) == b"x"


def test_an_object_freed_while_it_is_written_gives_its_slab_back_when_the_write_ends() -> None:
    """Its slab stays until the write is done; the same key can be made anew."""
    key = VALUES[0]
    tier, backing, pool = tier_of(PAGES[key])
    with waits_complete(backing):
        tier.follow((one(writes=(key,)), one(reads=(STATES[0],))))
        tier.acquire(one(writes=(key,)), 0)
        tier.release(one(writes=(key,)))
        tier.write_behind(0)
        tier.free(key)
        assert pool.live_bytes == backing.size_bytes(key)
        assert key not in tier.resident()
        again = one(writes=(key,))
        tier.acquire(again, 0)[key].memory[:1] = b"n"
        tier.release(again)
        tier.drain()
        assert pool.live_bytes == backing.size_bytes(key)
        assert bytes(tier.in_memory(key).memory[:1]) == b"n"


def test_saving_objects_are_read_at_once_and_changed_only_when_saved() -> None:
    """A reader does not wait for a commit that is under way; who changes the object does."""
    tier, backing, _ = tier_of(4)
    key = STATES[0]
    with waits_complete(backing):
        slab = tier.acquire(one(changes=(key,)), 0)[key]
        done: Future[Any] = Future()
        backing.pending.append((done, key, slab, "write"))
        tier.saving([key], done)
        tier.release(one(changes=(key,)))
        tier.acquire(one(reads=(key,)), 0)
        tier.release(one(reads=(key,)))
        assert not done.done()
        tier.acquire(one(changes=(key,)), 0)
        assert done.done()


def test_what_cannot_fit_is_refused_with_the_number() -> None:
    """An instruction larger than the pool names what is missing."""
    tier, backing, _ = tier_of(2)
    with waits_complete(backing), pytest.raises(PoolExhausted, match="raise memory"):
        tier.acquire(one(reads=tuple(STATES)), 0)


def test_a_view_that_is_about_to_go_is_waited_for() -> None:
    """A thread that has read or written lets go of its slab a moment behind its future."""
    tier, backing, _ = tier_of(PAGES[STATES[0]] + PAGES[STATES[1]] - 1)
    first = one(reads=(STATES[0],))
    with waits_complete(backing):
        slabs = tier.acquire(first, 0)
        views = [slabs[STATES[0]].memory]
        del slabs
        tier.release(first)
        threading.Timer(0.02, views.clear).start()
        slabs = tier.acquire(one(reads=(STATES[1],)), 1)
    assert not views
    assert bytes(slabs[STATES[1]].memory) == backing.contents[STATES[1]]


def test_reading_ahead_costs_no_more_than_the_plan() -> None:
    """In a sweep that goes round, what is read ahead does not push out what is needed next."""
    keys = [ObjectKey(Kind.STATE, f"part{i}", 1) for i in range(20)]
    backing = LateBacking()
    backing.contents = {key: bytes(PAGE_BYTES) for key in keys}
    backing.size_bytes = lambda _: PAGE_BYTES  # type: ignore[method-assign]
    pool = PagePool(10 * PAGE_BYTES)
    tier = Tier(pool, backing, backing.wait)
    sweep = tuple(one(reads=(key,)) for key in keys)
    with waits_complete(backing):
        for _ in range(4):
            before = tier.counters.missed_bytes
            tier.follow(sweep, sweep)
            for position, instruction in enumerate(sweep):
                tier.acquire(instruction, position)
                tier.prefetch(position)
                tier.release(instruction)
                tier.write_behind(position)
                for index in reversed(range(len(backing.pending))):
                    backing.complete(index)
    least = simulate(sweep, backing.size_bytes, 9 * PAGE_BYTES, durable=lambda _: (), rounds=4)
    assert tier.counters.missed_bytes - before <= least.read_bytes < 20 * PAGE_BYTES


@given(st.lists(st.integers(0, len(PAGES) - 1), min_size=3), st.integers(4, 7))
def test_what_was_in_memory_is_looked_for_again_when_it_had_to_leave(
    touched: list[int], pages: int
) -> None:
    """Prefetch goes on where something was missing; from the beginning it would find no more."""
    keys = [(*STATES, *VALUES)[i] for i in touched]
    made = [key.kind is Kind.VALUE and key not in keys[:i] for i, key in enumerate(keys)]
    program = tuple(
        one(writes=(key,)) if fresh else one(reads=(key,))
        for key, fresh in zip(keys, made, strict=True)
    )
    found: list[list[list[ObjectKey]]] = []
    for from_the_beginning in (False, True):
        tier, backing, _ = tier_of(pages)
        tier.follow(program)
        found.append([])
        with waits_complete(backing):
            for position, instruction in enumerate(program):
                tier.acquire(instruction, position)
                if from_the_beginning:
                    tier._entries.whole_to = 0
                tier.prefetch(position)
                found[-1].append(sorted(tier.resident()))
                tier.release(instruction)
    assert found[0] == found[1]


def test_prefetch_stays_in_the_budget_when_a_view_of_an_evicted_object_lives_on() -> None:
    """Bytes that a forgotten view keeps alive count; a prefetch then waits for its turn."""
    tier, backing, pool = tier_of(4)
    program = tuple(one(reads=(STATES[i],)) for i in (1, 0, 2))
    with waits_complete(backing):
        tier.follow(program)
        view = tier.acquire(program[0], 0)[STATES[1]].memory
        tier.release(program[0])
        tier.acquire(program[1], 1)
        tier.prefetch(1)
        assert STATES[2] not in tier.resident()
        assert pool.held_bytes <= pool.budget_bytes
        del view
        tier.prefetch(1)
        assert STATES[2] in tier.resident()
