"""Charts over the steps of one run, or of two in the same axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swaptrain.report.chart import Chart, Curve, Unit
from swaptrain.report.read import RunFiles
from swaptrain.report.rows import Column
from swaptrain.report.thinning import stretch_means

__all__ = ["Bound", "Quantity", "over_steps", "parts_over_steps"]

_MOST_PARTS = 200
"""Points of a stacked chart."""

OfRows = Callable[[RunFiles], Column]


@dataclass(frozen=True)
class Quantity:
    """A number of each step."""

    name: str
    values: OfRows
    """By row; NaN where it is not known."""
    title: str = ""
    """Of a chart of its own."""
    before: str | None = None
    """Of what is measured after some steps only: its name in the row of step 1 for what it was
    before that step, which is drawn at 0."""


@dataclass(frozen=True)
class Bound:
    """What a quantity is to be compared with, drawn dashed."""

    name: str
    values: OfRows


def over_steps(
    runs: Sequence[RunFiles],
    title: str,
    unit: Unit,
    quantities: Sequence[Quantity],
    *,
    bound: Bound | None = None,
    note: str = "",
    from_zero: bool = True,
) -> list[Chart]:
    """Return one chart of all quantities of a run, or of two runs one chart for each quantity.

    What no run has a number of is left out. With a bound, the last quantity is what it bounds.
    """
    if len(runs) == 1:
        curves = [
            found
            for color, quantity in enumerate(quantities, 1)
            if (found := _of(runs[0], quantity, quantity.name, color)) is not None
        ]
        if curves and bound is not None:
            curves += _bounds(runs[0], bound, 7, "")
        return [Chart(title, unit, curves, note=note, from_zero=from_zero)] if curves else []
    charts = []
    for quantity in quantities:
        curves = []
        for color, run in enumerate(runs, 1):
            found = _of(run, quantity, run.label, color)
            if found is not None:
                # The first one is broad, so that the second does not hide it.
                curves.append(replace(found, broad=color == 1))
                if bound is not None and quantity is quantities[-1]:
                    curves += _bounds(run, bound, color, f"{run.label}: ")
        if curves:
            named = quantity.title or title
            charts.append(Chart(named, unit, curves, note=note, from_zero=from_zero))
    return charts


def _of(run: RunFiles, quantity: Quantity, name: str, color: int) -> Curve | None:
    found = _curve(run, name, quantity.values, color)
    if found is None or quantity.before is None:
        return found
    known = np.isfinite(found.y)
    found = replace(found, x=found.x[known], y=found.y[known])
    before = run.rows[quantity.before][:1]
    if not np.isfinite(before).all() or run.rows.steps[0] != 1:
        return found
    return replace(found, x=np.insert(found.x, 0, 0.0), y=np.insert(found.y, 0, before[0]))


def _curve(run: RunFiles, name: str, values: OfRows, color: int) -> Curve | None:
    """Return the curve of a run, None where nothing is known."""
    y = values(run)
    if not np.isfinite(y).any():
        return None
    return Curve(name, run.rows.steps, y, color)


def _bounds(run: RunFiles, bound: Bound, color: int, prefix: str) -> list[Curve]:
    found = _curve(run, f"{prefix}{bound.name}", bound.values, color)
    return [] if found is None else [replace(found, dashed=True)]


def parts_over_steps(
    runs: Sequence[RunFiles],
    title: str,
    unit: Unit,
    parts: Sequence[Quantity],
    colors: Sequence[int],
    bound: Bound,
) -> list[Chart]:
    """Return a chart for each run of what adds up in a step, as means of stretches of steps."""
    charts = []
    for run in runs:
        count = len(run.rows)
        if not count:
            continue
        x = stretch_means(run.rows.steps, _MOST_PARTS)
        curves = [
            Curve(part.name, x, stretch_means(part.values(run), _MOST_PARTS), color)
            for part, color in zip(parts, colors, strict=True)
        ]
        curves = [curve for curve in curves if np.nan_to_num(curve.y).any()]
        floor = stretch_means(bound.values(run), _MOST_PARTS)
        if np.isfinite(floor).any():
            curves.append(Curve(bound.name, x, floor, 8, dashed=True))
        if not curves:
            continue
        note = ""
        if count > _MOST_PARTS:
            note = f"Each point is the mean of about {round(count / _MOST_PARTS):,} steps."
        named = title if len(runs) == 1 else f"{title}: {run.label}"
        charts.append(Chart(named, unit, curves, kind="stack", note=note))
    return charts
