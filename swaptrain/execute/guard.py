"""Keeps the host budget when torch takes more than the dry run showed."""

from __future__ import annotations

from swaptrain.memory.slab import SlabPool
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.spans import spanned

__all__ = ["BudgetGuard"]

_LEAST_RESERVE_BYTES = 16 << 20


class BudgetGuard:
    """Moves bytes from the pool to the arena, one way, so that their sum stays the host budget.

    How far freed blocks of many sizes fit together in the allocator's heap cannot be known before:
    a model of 64 segments was seen to take a third more than three rounds of its classes. What the
    process holds beyond base and slabs is looked at after each instruction (some microseconds);
    slabs that the budget has no room for any more are given back, and the tier evicts.
    """

    def __init__(
        self, pool: SlabPool, *, base_bytes: int, host_bytes: int, least_bytes: int
    ) -> None:
        self._pool = pool
        self._base_bytes, self._host_bytes = base_bytes, host_bytes
        self._least_bytes = least_bytes
        # For what the next instruction may add: a hundredth, as larger segments add more at once.
        self._reserve_bytes = max(_LEAST_RESERVE_BYTES, host_bytes // 100)

    @spanned("look at memory")
    def check(self) -> None:
        """Shrink the pool, though not below what one instruction needs, if the sum is too much."""
        arena_bytes = resident_bytes() - self._base_bytes - self._pool.held_bytes
        allowed_bytes = self._host_bytes - arena_bytes - self._reserve_bytes
        budget_bytes = self._pool.budget_bytes
        if allowed_bytes < budget_bytes:
            allowed_bytes = min(allowed_bytes, budget_bytes - self._pool.least_cut_bytes)
            self._pool.shrink(max(allowed_bytes, self._least_bytes))
