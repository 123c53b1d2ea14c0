"""Fewer points for a chart of many: the extremes of each stretch, or its means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swaptrain.report.rows import Column

__all__ = ["MOST_POINTS", "extremes", "stretch_means", "stretches"]

MOST_POINTS = 600
"""Of a curve; a chart is drawn 500 units wide."""


def extremes(columns: Sequence[Column], most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Return the positions to draw: all, or of each stretch the least and the most of each column.

    The first and the last are among them, and the ends of what is known, where those are few. So of
    each column come at most twice `most`.
    """
    count = len(columns[0]) if columns else 0
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for begin, end in stretches(count, most // 2 - 1):
        for column in columns:
            piece = column[begin:end]
            if np.isfinite(piece).any():
                kept.add(begin + int(np.nanargmin(piece)))
                kept.add(begin + int(np.nanargmax(piece)))
    for column in columns:
        known = np.isfinite(column)
        ends = np.flatnonzero(known[1:] != known[:-1])
        if len(ends) <= most // 2:
            kept.update(ends.tolist(), (ends + 1).tolist())
    return np.array(sorted(kept), dtype=np.intp)


def stretches(count: int, most: int) -> list[tuple[int, int]]:
    """Return begins and ends of at most `most` stretches of about equal length."""
    edges = np.linspace(0, count, min(count, most) + 1).astype(int)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def stretch_means(column: Column, most: int) -> Column:
    """Return the mean of each stretch; NaN where it has no number."""
    if len(column) <= most:
        return column
    found = [column[begin:end] for begin, end in stretches(len(column), most)]
    return np.array([np.nanmean(p) if np.isfinite(p).any() else np.nan for p in found])
