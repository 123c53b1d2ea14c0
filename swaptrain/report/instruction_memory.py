"""What memory.json says: what held memory at each instruction of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swaptrain.report.rows import Column, number
from swaptrain.strict_json import read_json

__all__ = ["HELD", "InstructionMemory", "read_instruction_memory"]

_MOST_BYTES = 256 << 20
_MOST_INSTRUCTIONS = 1_000_000
HELD = ("weights", "state", "gradients", "values", "saved", "cache", "staging")
"""The parts of what slabs hold, as the file names them."""


@dataclass(frozen=True)
class InstructionMemory:
    """Bytes over the instructions of a step; NaN where the file does not say."""

    step: int | None
    budget_bytes: float
    base_bytes: float
    names: list[str]
    """Each instruction in words."""
    held: dict[str, Column]
    torch: Column
    """What torch has allocated."""
    resident: Column

    def __len__(self) -> int:
        return len(self.names)


def read_instruction_memory(path: Path) -> InstructionMemory | None:
    """Return what the file says, None where there is none; raises OSError, or ValueError."""
    try:
        found = read_json(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    rows = found.get("instructions") if isinstance(found, dict) else None
    if not isinstance(rows, list):
        raise ValueError("it has no list of instructions")
    rows = [row for row in rows[:_MOST_INSTRUCTIONS] if isinstance(row, dict)]
    step = found.get("step")
    parts = [row.get("held") if isinstance(row.get("held"), dict) else {} for row in rows]
    allocated = [row.get("torch") if isinstance(row.get("torch"), dict) else {} for row in rows]
    return InstructionMemory(
        step=step if type(step) is int else None,
        budget_bytes=number(found.get("budget_bytes")),
        base_bytes=number(found.get("base_bytes")),
        names=[_name(row) for row in rows],
        held={key: np.array([number(part.get(key)) for part in parts]) for key in HELD},
        torch=np.array([number(part.get("allocated")) for part in allocated]),
        resident=np.array([number(row.get("resident_bytes")) for row in rows]),
    )


def _name(row: dict[str, object]) -> str:
    said = str(row.get("operation", "")).lower()
    if type(segment := row.get("segment")) is int:
        said += f" of segment {segment}"
    micro_batch = row.get("micro_batch")
    if type(micro_batch) is int and micro_batch >= 0:
        said += f", micro-batch {micro_batch + 1}"
    return said
