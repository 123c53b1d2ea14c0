"""What a chart is, before anything is drawn: curves, units, marks, and the table behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from swaptrain.report.rows import Column
from swaptrain.report.thinning import MOST_POINTS, extremes
from swaptrain.units import format_duration, format_size

__all__ = ["Chart", "Curve", "Grid", "Mark", "Scale", "Unit", "said", "scale_of"]

Unit = Literal["bytes", "seconds", "share", "number", "step", "time", "position"]
ChartKind = Literal["lines", "stack", "bars"]

_MOST_TABLE_ROWS = 60


@dataclass(frozen=True)
class Curve:
    """A series of numbers over a chart's x."""

    name: str
    x: Column
    y: Column
    color: int
    """From 1: a colour of the page's palette."""
    dashed: bool = False
    """For a bound, a budget or a forecast beside what was measured."""
    broad: bool = False
    """Drawn thick, below the curves that follow."""


@dataclass(frozen=True)
class Mark:
    """A line across the chart at one x."""

    x: float
    name: str


@dataclass(frozen=True)
class Grid:
    """A table: its head, and rows of text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """One chart with its title and units."""

    title: str
    unit: Unit
    curves: Sequence[Curve]
    x_unit: Unit = "step"
    kind: ChartKind = "lines"
    marks: Sequence[Mark] = ()
    note: str = ""
    wide: bool = False
    """As wide as the page."""
    from_zero: bool = True
    x_names: Sequence[str] = field(default=(), repr=False)
    """What each x is called, where a number does not say it."""

    def thinned(self) -> Chart:
        """Return the chart with no more points than can be seen; its note says so.

        Curves over the same x keep the same points. What is stacked was thinned when it was made.
        """
        most = max((len(curve.x) for curve in self.curves), default=0)
        if self.kind != "lines" or most <= MOST_POINTS:
            return self
        together: dict[int, list[Column]] = defaultdict(list)
        for curve in self.curves:
            together[id(curve.x)].append(curve.y)
        kept = {key: extremes(columns) for key, columns in together.items()}
        curves = [
            replace(curve, x=curve.x[kept[id(curve.x)]], y=curve.y[kept[id(curve.x)]])
            for curve in self.curves
        ]
        drawn = max(len(curve.x) for curve in curves)
        text = f"{drawn:,} of {most:,} points: of each stretch the least and the most."
        return replace(self, curves=curves, note=f"{self.note} {text}".strip())

    def table(self) -> Grid:
        """Return the numbers behind the chart, at most sixty rows of them, evenly taken."""
        xs = np.unique(np.concatenate([curve.x for curve in self.curves] or [np.array([])]))
        shown = xs
        if len(xs) > _MOST_TABLE_ROWS:
            shown = xs[np.linspace(0, len(xs) - 1, _MOST_TABLE_ROWS).round().astype(int)]
        rows = [
            [self.x_text(x), *(_at(curve, x, self.unit) for curve in self.curves)] for x in shown
        ]
        note = f"{len(shown)} of {len(xs):,} rows" if len(shown) < len(xs) else ""
        return Grid([_X_NAMES.get(self.x_unit, ""), *(c.name for c in self.curves)], rows, note)

    def x_text(self, x: float) -> str:
        """Return what an x is called."""
        if self.x_names and 0 <= round(x) < len(self.x_names):
            return self.x_names[round(x)]
        return said(x, self.x_unit)


_X_NAMES = {"step": "step", "time": "time (UTC)", "position": "", "number": ""}


def _at(curve: Curve, x: float, unit: Unit) -> str:
    found = int(np.searchsorted(curve.x, x))
    if found == len(curve.x) or curve.x[found] != x:
        return ""
    return said(float(curve.y[found]), unit)


def said(value: float, unit: Unit) -> str:
    """Return a number with its unit, as a person reads it; a dash where it is not known."""
    if not np.isfinite(value):
        return "-"
    return _SAID[unit](value)


def _number(value: float) -> str:
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e5 else f"{value:.3g}"


def _time(value: float) -> str:
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")


_SAID: dict[Unit, Callable[[float], str]] = {
    "bytes": format_size,
    "seconds": format_duration,
    "share": lambda value: f"{value:.1%}",
    "number": _number,
    "step": lambda value: f"{value:,.0f}",
    "position": lambda value: f"{value:,.0f}",
    "time": _time,
}


_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class Scale:
    """What the numbers of an axis are divided by, and what they are then."""

    factor: float
    name: str


def scale_of(unit: Unit, largest: float) -> Scale:
    """Return the scale of an axis that goes up to `largest`."""
    if unit == "bytes":
        for factor, name in _SIZES:
            if largest >= factor:
                return Scale(factor, name)
        return Scale(1, "bytes")
    if unit == "seconds":
        for factor, name in _TIMES:
            if largest >= 2 * factor:
                return Scale(factor, name)
        return Scale(1e-3, "ms") if largest < 1 else Scale(1.0, "s")
    return Scale(0.01, "%") if unit == "share" else Scale(1.0, "")
