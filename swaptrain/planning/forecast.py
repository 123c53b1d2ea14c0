"""The forecast of a step: the one pipeline, for `plan` and for a start."""

from __future__ import annotations

from dataclasses import dataclass

from swaptrain.compute.device import ComputeDevice
from swaptrain.config.schema import Config
from swaptrain.machine.speeds import Machine
from swaptrain.planning.choose import choose_plan
from swaptrain.planning.planner import Plan
from swaptrain.planning.step_cost import Price, price
from swaptrain.planning.tier_overhead import with_tier_cost

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True)
class Forecast:
    """A plan with all its choices made, and the price of its steps."""

    plan: Plan
    price: Price


def forecast(
    plan: Plan,
    config: Config,
    device: ComputeDevice,
    machine: Machine | None,
    *,
    disk_bytes: int,
) -> Forecast:
    """Measure the tier, choose what makes a step shortest, and price it.

    `disk_bytes` may be reserved for what segments save. Without a machine's speeds no seconds are
    known, and nothing is measured.
    """
    if machine is not None:
        plan = with_tier_cost(plan, config, device)
    plan = choose_plan(plan, config, machine, disk_bytes=disk_bytes)
    if machine is not None and plan.builder.saves:  # what is saved takes slabs as well
        plan = with_tier_cost(plan, config, device)
    return Forecast(plan, price(plan, config, machine))
