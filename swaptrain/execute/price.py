"""Prices the steps of a plan: bytes that they move, seconds that they take."""

from __future__ import annotations

from dataclasses import dataclass

from swaptrain.config import Config
from swaptrain.execute.machine import Machine
from swaptrain.execute.planning import Plan
from swaptrain.memory.tier import planned_bytes
from swaptrain.program.cost import durable_objects, floor_s
from swaptrain.program.instructions import Kind, Operation
from swaptrain.program.residency import Traffic, simulate

__all__ = ["Price", "price"]

_LONGEST_SIMULATED = 20_000
"""Instructions; each one that has to make room looks at everything that is held."""


@dataclass(frozen=True)
class Price:
    """What a step in the middle of a run takes."""

    traffic: Traffic | None
    """Simulated; None where the program is too long for it."""
    compute_s: float
    """Of the forwards, backwards and updates, as measured one by one with no I/O beside them."""
    step_s: float | None
    """With the disk's part; None where its speed or the traffic is not known."""


def price(plan: Plan, config: Config, machine: Machine | None) -> Price:
    """Return what a step of the plan takes; the cache is what the tier does not use to read ahead.

    With commit_every > 1 the traffic is the mean of steps that commit and steps that do not.
    """
    traffic = _traffic(plan, config)
    compute_s = _compute_s(plan)
    if machine is None or traffic is None:
        return Price(traffic, compute_s, None)
    io_s = machine.disk.seconds(traffic.read_bytes, traffic.write_bytes)
    return Price(traffic, compute_s, floor_s(io_s, compute_s, machine.sigma))


def _traffic(plan: Plan, config: Config) -> Traffic | None:
    program = plan.step()
    pool_bytes = planned_bytes(plan.pool_bytes)
    if len(program) > _LONGEST_SIMULATED:
        return None
    durable = durable_objects(program, keeps_values=config.store.keeps_values)
    size_bytes, m = plan.layouts.size_bytes, config.store.commit_every
    committing = simulate(program, size_bytes, pool_bytes, durable=durable)
    if m == 1:
        return committing
    between = simulate(program, size_bytes, pool_bytes, durable=lambda _: ())
    return Traffic(
        (committing.read_bytes + (m - 1) * between.read_bytes) // m,
        (committing.write_bytes + (m - 1) * between.write_bytes) // m,
        committing.commit_bytes // m,
    )


def _compute_s(plan: Plan) -> float:
    seconds, model = plan.measured.seconds, plan.captured.model
    total = 0.0
    for instruction in plan.step():
        if instruction.segment and instruction.operation is not Operation.KEEP:
            isomorphism = model.segment(instruction.segment).isomorphism
            saves = any(key.kind is Kind.SAVED for key in instruction.touches)
            total += seconds[instruction.operation, isomorphism, saves]
    return total
