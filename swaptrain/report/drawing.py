"""Charts as SVG: matplotlib draws them, in colours that the page's style chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, MaxNLocator

from swaptrain.report.chart import Chart, Curve, Scale, scale_of
from swaptrain.report.lanes import Lane, Lanes
from swaptrain.report.rows import Column

__all__ = ["Drawing", "draw", "draw_lanes"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 8, 26
_WIDTH, _HEIGHT, _WIDE = 500, 230, 1040
_POINTS_AN_INCH = 72
_DAY_S = 86_400.0
# Of ticks at years, months, days, hours, minutes and seconds; and where a larger unit begins.
_TIMES = ["%Y", "%b %Y", "%d %b", "%H:%M", "%H:%M", "%H:%M:%S"]
_FULL_TIMES = ["%Y", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M:%S"]
_HALF_BAR = 0.38
_FEW_POINTS = 40
"""Curves of no more points show each."""
_COLORS = {f"#0000{number:02x}": f"var(--c{number})" for number in range(1, 10)}
"""What matplotlib is told, and what the page has instead."""
_INK, _GRID, _MARK, _PAPER = "#000010", "#000011", "#000012", "#000013"
_COLORS |= {
    _INK: "var(--muted)",
    _GRID: "var(--grid)",
    _MARK: "var(--mark)",
    _PAPER: "var(--paper)",
}
_HEAD = re.compile(r".*?(?=<svg )", re.DOTALL)
_SIZE = re.compile(r' (?:width|height)="[0-9.]+pt"')
_REMOVED = re.compile(r"\s*<metadata>.*?</metadata>|\s*<style.*?</style>|<!--.*?-->", re.DOTALL)
_ID = re.compile(r' id="([^"]*)"')
_USED = re.compile(r'(url\(#|href="#)')
_FONT = re.compile(r"font: [^;\"]*;?")
_COLOR = re.compile(r"#0000(?:0[1-9]|1[0-3])\b")
_SPACE = re.compile(r">\s+<")


@dataclass(frozen=True)
class Drawing:
    """A chart as SVG, and where in it the numbers are."""

    svg: str
    box: tuple[float, float, float, float]
    """Left, top, right and bottom of the axes, in units of the drawing."""
    x_range: tuple[float, float]
    """From the left to the right of the axes, in the unit of x."""
    scale: Scale


def draw(chart: Chart, name: str, *, wide: bool = False) -> Drawing:
    """Return the drawing of a chart; `name` begins every id in it."""
    width = _WIDE if wide else _WIDTH
    with _plain():
        figure, axes = _figure(width, _HEIGHT)
        scale = _curves(axes, chart)
        _x_axis(axes, chart)
        for mark in chart.marks:
            axes.axvline(_x(chart, mark.x), color=_MARK, linewidth=1, linestyle=(0, (2, 2)))
        return Drawing(
            _svg(figure, name),
            (_LEFT, _TOP, width - _RIGHT, _HEIGHT - _BOTTOM),
            _unscaled(chart, axes.get_xlim()),
            scale,
        )


def draw_lanes(lanes: Lanes, name: str, width: int) -> Drawing:
    """Return the drawing of a step's lanes, `width` units wide, with their names above them."""
    height = 46 * len(lanes.lanes) + _BOTTOM + 4
    scale = scale_of("seconds", lanes.seconds)
    with _plain():
        figure = _new_figure(width, height)
        axes = figure.add_axes((0, _BOTTOM / height, 1 - 16 / width, 1 - _BOTTOM / height))
        _style(axes)
        axes.set_xlim(0, lanes.seconds / scale.factor)
        axes.set_ylim(len(lanes.lanes), 0)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.spines["bottom"].set_color(_GRID)
        for number, lane in enumerate(lanes.lanes):
            _lane(axes, lane, number, lanes.seconds / scale.factor, scale.factor)
        axes.xaxis.set_major_locator(MaxNLocator(5 if width < _WIDTH else 9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} {scale.name}"))
        return Drawing(
            _svg(figure, name),
            (0, 0, width - 16, height - _BOTTOM),
            (0.0, lanes.seconds),
            scale,
        )


def _lane(axes: Any, lane: Lane, number: int, end: float, factor: float) -> None:
    """Draw a lane under its name; `end` is that of the step, `factor` the seconds of its unit."""
    top, bottom = number + 0.4, number + 0.94
    axes.text(0, number + 0.3, lane.name, color=_INK, fontsize=10.5, va="baseline", ha="left")
    axes.fill_between([0, end], bottom, bottom - 0.02, color=_GRID, linewidth=0)
    for piece in lane.pieces:
        begins, ends = (piece.spans / factor).T
        bottoms, tops = np.full(len(begins), bottom), np.full(len(begins), top)
        _blocks(axes, begins, ends, bottoms, tops, piece.color)
    if lane.depth is not None:
        edges = np.linspace(0, end, len(lane.depth) + 1)
        level = bottom - (bottom - top) * lane.depth / max(1.0, float(lane.depth.max()))
        look = {"fill": True, "color": _code(lane.color), "linewidth": 0}
        axes.stairs(level, edges, baseline=bottom, **look)


def _blocks(
    axes: Any, begins: Column, ends: Column, bottoms: Column, tops: Column, color: int
) -> None:
    """Draw upright rectangles as one path; the limits of the axes stay as they are."""
    if not len(begins):
        return
    corners = np.empty((len(begins), 5, 2))
    corners[:, (0, 1), 0], corners[:, (2, 3), 0] = begins[:, None], ends[:, None]
    corners[:, (0, 3), 1], corners[:, (1, 2), 1] = bottoms[:, None], tops[:, None]
    corners[:, 4] = corners[:, 0]
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(begins)
    outline = Outline(corners.reshape(-1, 2), codes)
    axes.add_artist(PathPatch(outline, facecolor=_code(color), edgecolor="none", linewidth=0))


@contextmanager
def _plain() -> Iterator[None]:
    """Let no setting of the user or of a folder count, and text stay text."""
    with matplotlib.rc_context():
        matplotlib.rcParams.update(matplotlib.rcParamsDefault)
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "swaptrain", "path.simplify": False}
        )
        yield


def _new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width / _POINTS_AN_INCH, height / _POINTS_AN_INCH))
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = _new_figure(width, height)
    axes = figure.add_axes(
        (
            _LEFT / width,
            _BOTTOM / height,
            1 - (_LEFT + _RIGHT) / width,
            1 - (_TOP + _BOTTOM) / height,
        )
    )
    _style(axes)
    return figure, axes


def _style(axes: Any) -> None:
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(length=0, labelsize=10.5, labelcolor=_INK, pad=6)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)


def _code(color: int) -> str:
    return f"#0000{color:02x}"


def _curves(axes: Any, chart: Chart) -> Scale:
    """Draw the curves; return the scale of their axis."""
    finite = [curve.y[np.isfinite(curve.y)] for curve in chart.curves]
    largest = max((float(values.max()) for values in finite if len(values)), default=0.0)
    if chart.kind != "lines":
        stacked = [c for c in chart.curves if not c.dashed]
        total = sum((np.nan_to_num(c.y) for c in stacked), np.zeros(1))
        largest = max(largest, float(total.max(initial=0.0)))
    scale = scale_of(chart.unit, largest)
    axes.margins(x=0)
    if chart.kind == "stack":
        _stack(axes, chart, scale)
    elif chart.kind == "bars":
        _bars(axes, chart, scale)
    for curve in chart.curves:
        if chart.kind == "lines" or curve.dashed:
            _line(axes, chart, curve, scale)
    locator = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=chart.unit == "step")
    least = min((float(values.min()) for values in finite if len(values)), default=0.0)
    if chart.from_zero or largest - least <= 1e-3 * abs(largest):
        least = min(0.0, least)
    ticks = locator.tick_values(least / scale.factor, max(largest, least) / scale.factor)
    axes.set_ylim(ticks[0], max(ticks[-1], ticks[0] + 1e-12))
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    return scale


def _tick(value: float, _: object) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(axes: Any, chart: Chart, curve: Curve, scale: Scale) -> None:
    few = len(curve.x) <= _FEW_POINTS and not curve.dashed
    alone = np.isfinite(curve.y).sum() == 1
    if chart.kind == "stack":  # it goes over areas of many colours
        axes.plot(
            _xs(chart, curve.x), curve.y / scale.factor, color=_PAPER, linewidth=3.6, clip_on=False
        )
    axes.plot(
        _xs(chart, curve.x),
        curve.y / scale.factor,
        color=_code(curve.color),
        linewidth=2.8 if curve.broad else 1.6,
        linestyle=(0, (5, 3)) if curve.dashed else "-",
        marker="o" if few or alone else None,
        markersize=3.2,
        markeredgewidth=0,
        solid_joinstyle="round",
        clip_on=False,
    )
    if not few and not curve.dashed:  # a number between two that are not known has no line
        known = np.isfinite(np.concatenate([[np.nan], curve.y, [np.nan]]))
        lone = known[1:-1] & ~known[:-2] & ~known[2:]
        if lone.any():
            axes.plot(
                _xs(chart, curve.x[lone]),
                curve.y[lone] / scale.factor,
                color=_code(curve.color),
                linestyle="none",
                marker="o",
                markersize=3.2,
                markeredgewidth=0,
                clip_on=False,
            )


def _stack(axes: Any, chart: Chart, scale: Scale) -> None:
    curves = [curve for curve in chart.curves if not curve.dashed]
    if not curves:
        return
    x, below = _xs(chart, curves[0].x), np.zeros(len(curves[0].x))
    if len(x) == 1:
        x, below = np.array([x[0] - 0.5, x[0] + 0.5]), np.zeros(2)
    for curve in curves:
        values = np.nan_to_num(curve.y) / scale.factor
        above = below + (np.repeat(values, 2) if len(values) == 1 else values)
        axes.fill_between(x, below, above, color=_code(curve.color), linewidth=0)
        below = above


def _bars(axes: Any, chart: Chart, scale: Scale) -> None:
    below: Column = np.zeros(1)
    for curve in chart.curves:
        above = below + np.nan_to_num(curve.y) / scale.factor
        below = np.broadcast_to(below, above.shape)
        _blocks(axes, curve.x - _HALF_BAR, curve.x + _HALF_BAR, below, above, curve.color)
        below = above
    axes.set_xlim(chart.curves[0].x.min() - 0.6, chart.curves[0].x.max() + 0.6)


def _xs(chart: Chart, x: Column) -> Column:
    return x / _DAY_S if chart.x_unit == "time" else x


def _x(chart: Chart, x: float) -> float:
    return x / _DAY_S if chart.x_unit == "time" else x


def _unscaled(chart: Chart, limits: Sequence[float]) -> tuple[float, float]:
    factor = _DAY_S if chart.x_unit == "time" else 1.0
    return limits[0] * factor, limits[1] * factor


def _x_axis(axes: Any, chart: Chart) -> None:
    low, high = axes.get_xlim()
    if not high > low or np.concatenate([np.zeros(0), *(c.x for c in chart.curves)]).size == 0:
        axes.set_xlim(0, 1)
    elif high - low < 1e-9 or (chart.x_unit == "step" and high - low < 0.6):
        axes.set_xlim(low - 0.5, high + 0.5)
    if chart.x_unit == "time":
        locator = AutoDateLocator(minticks=3, maxticks=6)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(
            ConciseDateFormatter(
                locator, formats=_TIMES, zero_formats=_FULL_TIMES, show_offset=False
            )
        )
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def _svg(figure: Figure, name: str) -> str:
    """Return the drawing without what a page has already, its colours named by the page's style."""
    written = StringIO()
    empty: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(written, format="svg", metadata=empty)
    text = _HEAD.sub("", written.getvalue(), count=1)
    text = _SIZE.sub("", text, count=2)
    text = _REMOVED.sub("", text)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))

    def kept(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in used else ""

    text = _ID.sub(kept, text)
    text = _USED.sub(rf"\g<1>{name}-", text.replace("xlink:href", "href"))
    text = _FONT.sub(lambda found: _size(found[0]), text)
    text = _COLOR.sub(lambda found: _COLORS[found[0]], text)
    text = _SPACE.sub("><", text)
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1).strip()


def _size(font: str) -> str:
    """Keep the size of a font; the page has its own."""
    found = re.search(r"([0-9.]+)px", font)
    return f"font-size: {found[1] if found else '10.5'}px;"
