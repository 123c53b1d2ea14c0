"""The host budget holds when torch takes more than was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import PoolExhausted
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.run import memory_guard as guard
from swaptrain.run.memory_guard import BudgetGuard

MIB = 1 << 20


def test_what_torch_takes_beyond_the_plan_is_taken_from_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arena and pool stay within the budget together; free pages go at once, taken ones stay."""
    pool = PagePool(40 * MIB)
    taken, kept = pool.take(20 * MIB), pool.take(20 * MIB)
    pool.give(kept)
    arena_bytes = 10 * MIB
    monkeypatch.setattr(guard, "resident_bytes", lambda: 100 * MIB + pool.held_bytes + arena_bytes)
    budget = BudgetGuard(pool, base_bytes=100 * MIB, host_bytes=66 * MIB, least_bytes=24 * MIB)
    budget.check()
    assert (pool.budget_bytes, pool.held_bytes) == (40 * MIB, 40 * MIB)
    arena_bytes = 20 * MIB
    budget.check()
    assert (pool.budget_bytes, pool.held_bytes) == (30 * MIB, 30 * MIB)
    with pytest.raises(PoolExhausted):
        pool.take(11 * MIB)
    arena_bytes = 60 * MIB
    budget.check()
    assert pool.budget_bytes == 24 * MIB  # one instruction has to fit
    arena_bytes = 0
    budget.check()
    assert pool.budget_bytes == 24 * MIB  # and what was lost is not taken back
    pool.give(taken)


@dataclass
class Arena:
    """What the process holds beyond base and slabs."""

    nbytes: int = 10 * MIB


def guarded(
    monkeypatch: pytest.MonkeyPatch, **rules: Callable[[Instruction], int]
) -> tuple[Arena, PagePool, BudgetGuard]:
    """Return a pool of 40 MiB, all of it held, under a budget of 66."""
    arena, pool = Arena(), PagePool(40 * MIB)
    pool.give(pool.take(40 * MIB))
    monkeypatch.setattr(guard, "resident_bytes", lambda: 100 * MIB + pool.held_bytes + arena.nbytes)
    budget = BudgetGuard(
        pool, base_bytes=100 * MIB, host_bytes=66 * MIB, least_bytes=12 * MIB, **rules
    )
    return arena, pool, budget


def test_an_instruction_of_a_new_kind_gets_what_it_takes_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool makes way before it, and gets back what was not needed; the second time nothing."""
    left = [20 * MIB]
    arena, pool, budget = guarded(monkeypatch, own_bytes=lambda _: left.pop() if left else 0)
    turn = Instruction(Operation.TURN, 3, 0)
    assert budget.make_way(turn)
    assert (pool.budget_bytes, pool.held_bytes) == (20 * MIB, 20 * MIB)
    arena.nbytes = 15 * MIB  # it found free blocks for the rest
    budget.check()
    assert pool.budget_bytes == 35 * MIB
    assert not budget.make_way(turn)
    budget.check()
    assert pool.budget_bytes == 35 * MIB


def test_the_heap_grows_before_an_instruction_for_which_it_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it grew by counts as taken before a page of it is, and only once."""
    grown = [12 * MIB]
    arena, pool, budget = guarded(monkeypatch, heap_growth=lambda _: grown.pop() if grown else 0)
    backward = Instruction(Operation.BACKWARD, 3, 1)
    assert budget.make_way(backward)
    assert pool.budget_bytes == (66 - 16 - 10 - 12) * MIB
    arena.nbytes = 22 * MIB  # it took what the heap grew by
    budget.check()
    assert not budget.make_way(backward)
    assert pool.budget_bytes == (66 - 16 - 22) * MIB
