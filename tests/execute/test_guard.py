"""The host budget holds when torch takes more than was measured."""

from __future__ import annotations

import pytest

from swaptrain.execute import guard
from swaptrain.execute.guard import BudgetGuard
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import PoolExhausted

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
