"""Keeps the host budget when torch takes more than the dry run showed."""

from __future__ import annotations

from collections.abc import Callable

from swaptrain.capture.captured import Captured
from swaptrain.capture.ranges.expert_products import has_products
from swaptrain.compute.device import ComputeDevice
from swaptrain.memory.malloc import grow_heap
from swaptrain.memory.slab import SlabPool
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.planning.measure.measured import Measured, kind_of
from swaptrain.planning.planner import Plan
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.spans import spanned
from swaptrain.units import format_size

__all__ = ["BudgetGuard", "HeapGrowth", "OwnBytes", "UnusedBlocks"]

_GIVES_GRADIENTS = (Operation.BACKWARD, Operation.TURN)
_LEAST_RESERVE_BYTES = 16 << 20
_LEAST_GAP_BYTES = 64 << 20
_GAP_PART = 4
"""Of what is reserved, a fourth that no step needed is too much."""
_PAUSE = 16
"""Steps without a look after blocks were given back: what a step takes again it needs."""


class BudgetGuard:
    """Moves bytes from the pool to the arena, one way, so that their sum stays the host budget.

    How far freed blocks of many sizes fit together in the allocator's heap cannot be known before:
    a model of 64 segments was seen to take a third more than three rounds of its classes. What the
    process holds beyond base and slabs is looked at after each instruction (some microseconds);
    slabs that the budget has no room for any more are given back, and the tier evicts.

    An instruction of a kind that has not run before may find every free block too small: the
    graphs that wait for their backward lie between them. So `make_way` lends it, for that one
    time, what it takes by itself; `check` takes back what it did not need.

    Where a router decides how many rows each expert has, the blocks of no two micro-batches have
    the same sizes, and a gradient of a third of the budget may find its hole too small in the
    fourth (of 2,560 MiB one step took 2,843). So the heap is asked for that room before, and what
    it grew by counts as taken from then on.
    """

    def __init__(
        self,
        pool: SlabPool,
        *,
        base_bytes: int,
        host_bytes: int,
        least_bytes: int,
        own_bytes: Callable[[Instruction], int] = lambda _: 0,
        heap_growth: Callable[[Instruction], int] = lambda _: 0,
    ) -> None:
        """Guard `pool`; `own_bytes` says what torch takes for an instruction not run before.

        `heap_growth` makes room in the heap for one that has run, and says how much the heap grew.
        """
        self._pool, self._own_bytes, self._heap_growth = pool, own_bytes, heap_growth
        self._promised_bytes = 0
        """What the process may hold beyond base and slabs without the heap growing."""
        self._lent_from: int | None = None
        """The pool's budget before a part of it was lent."""
        self._base_bytes, self._host_bytes = base_bytes, host_bytes
        self._least_bytes = least_bytes
        # For what the next instruction may add: a hundredth, as larger segments add more at once.
        self._reserve_bytes = max(_LEAST_RESERVE_BYTES, host_bytes // 100)

    def make_way(self, instruction: Instruction) -> bool:
        """Lower the pool's budget for an instruction of a new kind; say whether it was too high.

        Slabs in use stay until the tier evicts them.
        """
        own_bytes = self._own_bytes(instruction)
        if not own_bytes:
            return self._grow_heap(instruction)
        allowed_bytes = max(self._allowed_bytes() - own_bytes, self._least_bytes)
        # What lies in one region cannot be lent: its end would be given back for good.
        if self._pool.least_cut_bytes or allowed_bytes >= self._pool.budget_bytes:
            return False
        self._lent_from = self._pool.budget_bytes
        self._pool.shrink(allowed_bytes)
        return True

    @spanned("look at memory")
    def check(self) -> None:
        """Shrink the pool, though not below what one instruction needs, if the sum is too much."""
        if self._lent_from is not None:
            self._pool.budget_bytes, self._lent_from = self._lent_from, None
        self._shrink()

    def _grow_heap(self, instruction: Instruction) -> bool:
        """Make room in the heap, and say whether the pool has to become smaller for it."""
        grown_bytes = self._heap_growth(instruction)
        if not grown_bytes:
            return False
        self._promised_bytes = max(self._promised_bytes, self._arena_bytes()) + grown_bytes
        return self._shrink()

    def _shrink(self) -> bool:
        allowed_bytes, budget_bytes = self._allowed_bytes(), self._pool.budget_bytes
        if allowed_bytes >= budget_bytes:
            return False
        allowed_bytes = min(allowed_bytes, budget_bytes - self._pool.least_cut_bytes)
        self._pool.shrink(max(allowed_bytes, self._least_bytes))
        return True

    def _allowed_bytes(self) -> int:
        """Return what the pool may hold beside what the process holds now, or may hold soon."""
        arena_bytes = max(self._arena_bytes(), self._promised_bytes)
        return self._host_bytes - arena_bytes - self._reserve_bytes

    def _arena_bytes(self) -> int:
        return resident_bytes() - self._base_bytes - self._pool.held_bytes


class OwnBytes:
    """What torch takes for an instruction of a kind that has not run before; 0 ever after."""

    def __init__(self, captured: Captured, measured: Measured) -> None:
        self._captured, self._left = captured, dict(measured.own_bytes)

    def __call__(self, instruction: Instruction) -> int:
        """Return the bytes the first time that an instruction of its kind is asked for."""
        if not instruction.segment or instruction.is_exchange:
            return 0
        return self._left.pop(kind_of(self._captured, instruction), 0)


class HeapGrowth:
    """What the heap grows by so that a backward of routed experts finds one block for all it takes.

    Other models need none: the blocks of all their micro-batches have the same sizes.
    """

    def __init__(self, captured: Captured, measured: Measured) -> None:
        routed = has_products(code.train for code in captured.codes)
        self._captured, self._own_bytes = captured, measured.own_bytes if routed else {}

    def __call__(self, instruction: Instruction) -> int:
        """Return by how many bytes it grew; 0 where the room was there."""
        if not self._own_bytes or instruction.operation not in _GIVES_GRADIENTS:
            return 0
        own_bytes = self._own_bytes.get(kind_of(self._captured, instruction), 0)
        return grow_heap(own_bytes) if own_bytes else 0


class UnusedBlocks:
    """Looks between steps at the gap between what the allocator reserved and what is in use.

    Between two steps nothing is computed, so on a device all of its blocks are free, and the next
    step takes most of them again. Too much is only what goes beyond the need of a step: on a CPU
    what is resident beyond the plan's share for computing, on a device what is reserved beyond the
    most that was allocated at once. To give it back changes no result and no budget: the next step
    asks for it anew.
    """

    def __init__(
        self, device: ComputeDevice, plan: Plan, pool: SlabPool, note: Callable[[str], None]
    ) -> None:
        self._device, self._plan, self._pool, self._note = device, plan, pool, note
        self._wait = 0

    def step_done(self) -> None:
        """Give blocks back where the gap passes the limit, and say so."""
        if self._wait:
            self._wait -= 1
            return
        held = self._device.allocator_bytes()
        if held is None:
            return
        gap_bytes = held.reserved_bytes - max(held.allocated_bytes, held.most_allocated_bytes)
        if self._device.device.type == "cpu":
            gap_bytes = min(gap_bytes, self._beyond_plan())
        if gap_bytes < max(_LEAST_GAP_BYTES, held.reserved_bytes // _GAP_PART):
            return
        before = self._resident(held.reserved_bytes)
        self._device.give_back_cached()
        after = self._device.allocator_bytes()
        freed = before - self._resident(0 if after is None else after.reserved_bytes)
        self._wait = _PAUSE
        self._note(
            f"gave back {format_size(max(0, freed))} that the allocator kept free: it held "
            f"{format_size(gap_bytes)} more than a step needs"
        )

    def _beyond_plan(self) -> int:
        held_bytes = self._plan.base_bytes + self._pool.held_bytes + self._plan.arena_bytes
        return resident_bytes() - held_bytes

    def _resident(self, reserved_bytes: int) -> int:
        """Return what giving back lowers: on a device what is reserved, else the resident set."""
        return resident_bytes() if self._device.device.type == "cpu" else reserved_bytes
