"""Measures what a step takes beside computing and I/O: the tier's bookkeeping, pages, batches."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from swaptrain.compute.device import ComputeDevice
from swaptrain.config.schema import Config
from swaptrain.data import Batches
from swaptrain.errors import RunError
from swaptrain.planning.planner import Plan
from swaptrain.planning.ram_budget import useful_bytes
from swaptrain.planning.simulation import Rehearsal
from swaptrain.planning.step_cost import usual_durability

__all__ = ["with_load_cost", "with_tier_cost"]

_MOST_BYTES = 1 << 30
"""Of slabs. With 1.7 GiB the pages that move took 2 % of a step (271 M on two cores)."""
_MOST_INSTRUCTIONS = 1_000
"""Up to here a step is rehearsed within a second."""
_STEPS = 5
_LONGEST_S = 1.0
"""No step more is begun after so long."""


def with_load_cost(plan: Plan, data: Batches) -> Plan:
    """Return the plan with the seconds that a micro-batch takes to load, the second time.

    Raises RunError, naming the item, where it cannot be loaded.
    """
    data.batch(1, 0)
    begun = time.perf_counter()
    data.batch(1, 0)
    return replace(plan, load_s=time.perf_counter() - begun)


def with_tier_cost(plan: Plan, config: Config, device: ComputeDevice) -> Plan:
    """Return the plan with the seconds that the tier takes for an instruction of a step.

    Some steps are rehearsed with no disk and no computing, on slabs of real memory, as many as a
    run has; the median counts of those after the first, in which the memory comes from the system.
    What an earlier start measured is taken. Not measured for large budgets and long programs, nor
    where the machine refuses the memory, which the run then says in its own words.
    """
    if plan.measured.tier_s:
        return replace(plan, tier_s=plan.measured.tier_s)
    program = plan.step
    most_bytes = useful_bytes(plan)
    if len(program) > _MOST_INSTRUCTIONS or min(plan.pool_bytes, most_bytes) > _MOST_BYTES:
        return plan
    pool = device.pool(plan.pool_bytes, useful_bytes=most_bytes)
    taken: list[float] = []
    rehearsal = Rehearsal(plan.layouts.size_bytes, pool, seconds=lambda _: 0.0, disk=None)
    durability = usual_durability(plan, config)
    try:
        rehearsal.run(program, program, durability)
        while len(taken) < _STEPS and sum(taken) < _LONGEST_S:
            begun = time.perf_counter()
            rehearsal.run(program, program, durability)
            taken.append(time.perf_counter() - begun)
    except (OSError, RunError):  # no memory, or none that can be pinned
        return plan
    finally:
        rehearsal.close()
        pool.trim()
    return replace(plan, tier_s=statistics.median(taken) / len(program))
