"""Measures what the tier itself takes: its bookkeeping, and pages that go from slab to slab."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from swaptrain.config import Config
from swaptrain.execute.planning import Plan
from swaptrain.execute.price import durable_keys, instruction_seconds
from swaptrain.execute.ram import has_memory
from swaptrain.execute.rehearsal import Rehearsal
from swaptrain.memory.slab import Pool

__all__ = ["with_tier_cost"]

_LONGEST_S = 0.05
"""Of an instruction's computing, on the average: beside more, the tier's part does not show."""
_MOST_INSTRUCTIONS = 1_000
_STEPS = 6
"""In the first one the memory comes from the system."""


def with_tier_cost(plan: Plan, config: Config) -> Plan:
    """Return the plan with the seconds that the tier takes for an instruction of a step.

    Some steps are rehearsed with no disk and no computing, on slabs of real memory, as many as a
    run has; the median of the steps counts. Not measured where it would not show, or where
    the machine refuses the memory, which a run says in its own words.
    """
    program, seconds = plan.step(), instruction_seconds(plan)
    count = len(program)
    if count > _MOST_INSTRUCTIONS or sum(map(seconds, program)) > count * _LONGEST_S:
        return plan
    if not has_memory(config.memory.host, plan):
        return plan
    pool, taken = Pool(plan.pool_bytes), []
    rehearsal = Rehearsal(plan.layouts.size_bytes, pool, seconds=lambda _: 0.0, disk=None)
    try:
        for _ in range(_STEPS):
            begun = time.perf_counter()
            rehearsal.run(program, program, durable_keys(program, config))
            taken.append(time.perf_counter() - begun)
    except OSError:
        return plan
    finally:
        rehearsal.close()
        pool.trim()
    return replace(plan, tier_s=statistics.median(taken[1:]) / count)
