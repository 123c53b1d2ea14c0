"""The rows of metrics.jsonl as columns of numbers, whatever the file holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swaptrain.strict_json import parse_json

__all__ = ["Column", "StepRows", "moment", "number", "read_columns"]

Column = NDArray[np.float64]

_LONGEST_BYTES = 2**20
_MOST_ROWS = 5_000_000
_MOST_COLUMNS = 64
_LARGEST = 1e30
_LATEST = 4e9
"""Of a time, in seconds since 1970: in 2096."""


@dataclass(frozen=True)
class StepRows:
    """The steps of a run, each once, in their order; NaN stands for what a row does not say."""

    columns: dict[str, Column]
    refused: int = 0
    """Lines that are no row of a step that follows: torn, garbled, or written twice."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def steps(self) -> Column:
        """Return the numbers of the steps."""
        return self.columns["step"]

    def __getitem__(self, name: str) -> Column:
        """Return a column; of a name that no row has, one of NaN."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Whether any row says something under this name."""
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())


def number(value: Any) -> float:
    """Return a value that can be drawn, or NaN: anybody can write the file. True is 1."""
    if type(value) in {int, float} and abs(value) < _LARGEST:
        return float(value)
    return 1.0 if value is True else float("nan")


def moment(value: Any) -> float:
    """Return a value that can be a time since 1970, or NaN."""
    found = number(value)
    return found if 0 < found < _LATEST else float("nan")


def read_columns(path: Path) -> StepRows:
    """Return the rows of a file that may grow meanwhile; none where there is no file.

    A last line without its end is being written, and is passed over; other lines that are no rows
    are counted. Raises OSError.
    """
    columns: dict[str, list[float]] = {"step": []}
    steps, refused = columns["step"], 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return _rows(columns, 0)
    with file:
        for line in iter(lambda: file.readline(_LONGEST_BYTES), b""):
            if not line.endswith(b"\n") and len(line) < _LONGEST_BYTES:
                break
            row = _row(line)
            if row is None or (steps and row["step"] <= steps[-1]) or len(steps) == _MOST_ROWS:
                refused += 1
                continue
            count = len(steps)
            for name, value in row.items():
                column = columns.get(name)
                if column is None:
                    if len(columns) == _MOST_COLUMNS:
                        continue
                    column = columns[name] = []
                if len(column) < count:
                    column.extend([float("nan")] * (count - len(column)))
                column.append(moment(value) if name == "ended_at" else number(value))
    return _rows(columns, refused)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    step = row.get("step")
    return row if type(step) is int and 0 < step < 2**53 else None


def _rows(columns: dict[str, list[float]], refused: int) -> StepRows:
    count = len(columns["step"])
    found = {}
    for name, values in columns.items():
        column = np.full(count, np.nan)
        column[: len(values)] = values
        found[name] = column
    return StepRows(found, refused)
