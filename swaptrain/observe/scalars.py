"""The numbers of a row of metrics.jsonl, as another program shows them over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["scalars"]

_NO_FIGURES = {"step", "ended_at"}
"""What a figure is drawn over."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by their keys; null and true are none."""
    return {
        key: value
        for key, value in row.items()
        if type(value) in (int, float) and key not in _NO_FIGURES
    }
