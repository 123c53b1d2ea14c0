"""Refuses a device budget that one instruction cannot work in."""

from __future__ import annotations

from collections.abc import Callable

from swaptrain.capture.captured import Captured
from swaptrain.compute.device_prefetch import needed_bytes
from swaptrain.errors import BudgetError
from swaptrain.program.instructions import Program
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.units import format_size, roomy_size

__all__ = ["DeviceBudgetError", "check_device_budget"]


class DeviceBudgetError(BudgetError):
    """The device has no room for the segments of a cut; smaller ones may fit."""


def check_device_budget(
    budget_bytes: int,
    captured: Captured,
    layouts: Layouts,
    program: Program,
    *,
    hint: str = "",
    remedy: Callable[[int], str | None] = lambda _: None,
) -> None:
    """Raise DeviceBudgetError, with the number, where an instruction needs more than the budget.

    Kernels' scratch is not counted, so a budget just above may still run out; the run then stops
    with exit 1 and can go on with a larger one. The `hint` is given where what is computed takes
    more than what is read and written; else the `remedy` for an instruction of so many bytes.
    """

    largest = max(program, key=lambda i: needed_bytes([i], captured, layouts))
    needed = needed_bytes([largest], captured, layouts)
    if needed > budget_bytes:
        computes = bool(largest.segment) and not largest.is_exchange
        at_once_bytes = captured.computed_by(largest).at_once_bytes if computes else 0
        computing = 2 * at_once_bytes > needed
        helps = None if computing else remedy(needed)
        if helps is None:
            helps = ", memory.segment to less, or data.micro_batch to less"
            helps += hint if computing else ""
        raise DeviceBudgetError(
            f"memory.device is {format_size(budget_bytes)}, and {largest} needs "
            f"{format_size(needed)}: set memory.device to {roomy_size(needed)}{helps}",
            key="memory.device",
            enough=roomy_size(needed),
        )
