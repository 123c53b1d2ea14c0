"""Refuses a device budget that one instruction cannot work in."""

from __future__ import annotations

from swaptrain.capture.capture import Captured
from swaptrain.errors import BudgetError
from swaptrain.execute.layouts import Layouts
from swaptrain.program.instructions import Instruction, Program
from swaptrain.units import format_size, roomy_size

__all__ = ["check_device_budget"]


def check_device_budget(
    budget_bytes: int, captured: Captured, layouts: Layouts, program: Program
) -> None:
    """Raise BudgetError, with the number, where `memory.device` is too small for an instruction.

    Counted, from the graph's own sizes: the objects that the instruction touches and every tensor
    that its segment computes. Kernels' scratch is not in it, so a budget just above may still run
    out; the run then stops with exit 1 and can go on with a larger one.
    """

    def needed_bytes(instruction: Instruction) -> int:
        held = sum(layouts.size_bytes(key) for key in set(instruction.touches))
        if instruction.segment == 0:
            return held
        return held + captured.model.segment(instruction.segment).activation_bytes

    largest = max(program, key=needed_bytes)
    needed = needed_bytes(largest)
    if needed > budget_bytes:
        raise BudgetError(
            f"memory.device is {format_size(budget_bytes)}, and {largest} needs "
            f"{format_size(needed)}: set memory.device to {roomy_size(needed)}, memory.segment to "
            "less, or data.micro_batch to less"
        )
