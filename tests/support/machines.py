"""A machine whose figures are known, so that nothing is measured."""

from __future__ import annotations

from swaptrain.machine.speeds import Machine
from swaptrain.program.cost import Disk, IOWork

__all__ = ["MACHINE"]

MACHINE = Machine(
    Disk(2e9, 2e9, 2e9), 0.0, IOWork(), dict.fromkeys(("float32", "bfloat16", "float16"), 1e11)
)
