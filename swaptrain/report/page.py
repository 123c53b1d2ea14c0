"""The page: sections, charts and tables as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import swaptrain
from swaptrain.report.chart import Chart, said
from swaptrain.report.drawing import Drawing, draw, draw_lanes
from swaptrain.report.lanes import Lanes
from swaptrain.report.overview import differing_keys, facts, figures
from swaptrain.report.read import RunFiles
from swaptrain.report.sections import sections

__all__ = ["MARK", "page_of"]

MARK = b"<!doctype html>\n<!-- made by swaptrain report -->\n"
"""How every page begins."""
_DIGITS = 6
"""Of a number in the page's data; the tables have them as a person reads them."""
_LANES_WIDE, _LANES_NARROW = 1040, 400


@dataclass(frozen=True)
class Plotted:
    """A chart that is drawn."""

    chart: Chart
    name: str
    unit: str
    """Of the numbers on the axis."""
    drawings: Sequence[tuple[str, Markup, dict[str, Any]]]
    """Class and drawing; and, for the script, the numbers and where they are in it."""
    label: str
    """What a screen reader says."""


@dataclass(frozen=True)
class Timeline:
    """The lanes of a step, drawn for a wide and for a narrow page."""

    name: str
    drawings: Sequence[tuple[str, Markup, dict[str, Any]]]
    """Class, drawing and data of each."""
    label: str
    legend: Sequence[tuple[str, int]]


class _Plotter:
    """Draws charts, each under a name of its own."""

    def __init__(self) -> None:
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"f{self._count}"

    def chart(self, chart: Chart) -> Plotted:
        """Return a chart as it is put into the page."""
        name, thin = self._name(), chart.thinned()
        kinds = (("wide", True), ("narrow", False)) if chart.wide else (("", False),)
        drawn = [(kind, draw(thin, f"{name}{kind}", wide=wide)) for kind, wide in kinds]
        drawings = [(kind, Markup(d.svg), _data(thin, d)) for kind, d in drawn]
        return Plotted(thin, name, _unit(chart, drawn[0][1]), drawings, _label(chart))

    def lanes(self, lanes: Lanes) -> Timeline:
        """Return the timeline of a step."""
        name = self._name()
        widths = (("wide", _LANES_WIDE), ("narrow", _LANES_NARROW))
        drawn = [(kind, draw_lanes(lanes, f"{name}{kind}", width)) for kind, width in widths]
        legend = [(piece.name, piece.color) for piece in lanes.lanes[0].pieces]
        label = f"Timeline of step {lanes.step}, {said(lanes.seconds, 'seconds')}"
        return Timeline(
            name,
            [(kind, Markup(d.svg), _lanes_data(lanes, d)) for kind, d in drawn],
            label,
            legend,
        )


def page_of(runs: Sequence[RunFiles], made_at: float) -> bytes:
    """Return the page of one run, or of two side by side; `made_at` in seconds since 1970."""
    environment = Environment(
        loader=PackageLoader("swaptrain.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = _asset("script.js"), _asset("style.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.get_template("page.html").render(
        title=" and ".join(run.label for run in runs),
        runs=runs,
        figures=[figures(run) for run in runs],
        facts=[facts(run) for run in runs],
        differing=differing_keys(*runs) if len(runs) == 2 else None,
        sections=sections(runs),
        plot=_Plotter(),
        said=said,
        script=Markup(script),
        style=Markup(style),
        script_digest=digest,
        made_at=datetime.fromtimestamp(made_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=swaptrain.__version__,
    )
    return MARK + text.encode("utf-8", "replace")


def _unit(chart: Chart, drawing: Drawing) -> str:
    """Return what the axes have, such as `GiB by step`."""
    by = "segment" if chart.kind == "bars" else _BY.get(chart.x_unit, "")
    return f"{drawing.scale.name} by {by}".strip() if by else drawing.scale.name


_BY = {"step": "step", "time": "time (UTC)", "position": "instruction"}


def _asset(name: str) -> str:
    return files("swaptrain.report").joinpath("assets", name).read_text(encoding="utf-8")


def _data(chart: Chart, drawing: Drawing) -> dict[str, Any]:
    curves = [
        {
            "name": curve.name,
            "color": curve.color,
            "x": list(_rounded(curve.x, 12 if chart.x_unit == "time" else 9)),
            "y": list(_rounded(curve.y, _DIGITS)),
        }
        for curve in chart.curves
    ]
    return {
        "box": drawing.box,
        "xs": drawing.x_range,
        "unit": chart.unit,
        "x_unit": chart.x_unit,
        "x_name": "segment" if chart.kind == "bars" else "",
        "names": list(chart.x_names),
        "curves": curves,
    }


def _lanes_data(lanes: Lanes, drawing: Drawing) -> dict[str, Any]:
    found = []
    for lane in lanes.lanes:
        pieces = [
            {"name": piece.name, "color": piece.color, "spans": _spans(piece.spans)}
            for piece in lane.pieces
        ]
        depth = None if lane.depth is None else list(_rounded(lane.depth, 3))
        found.append({"name": lane.name, "color": lane.color, "pieces": pieces, "depth": depth})
    return {"box": drawing.box, "xs": drawing.x_range, "lanes": found}


def _spans(spans: np.ndarray[Any, Any]) -> list[float | None]:
    return list(_rounded(spans.reshape(-1), _DIGITS))


def _rounded(values: np.ndarray[Any, Any], digits: int) -> Iterator[float | None]:
    """Yield numbers that JSON has, with so many digits; None for others."""
    for value in values.tolist():
        if not math.isfinite(value):
            yield None
        elif value == int(value) and abs(value) < 1e15:
            yield int(value) if digits >= 9 else int(float(f"{value:.{digits}g}"))
        else:
            yield float(f"{value:.{digits}g}")


def _label(chart: Chart) -> str:
    """Return a chart in a sentence."""
    parts = []
    for curve in chart.curves:
        known = curve.y[np.isfinite(curve.y)]
        if len(known):
            ends = (
                f"from {said(float(known[0]), chart.unit)} to {said(float(known[-1]), chart.unit)}"
            )
            most = f"at most {said(float(known.max()), chart.unit)}"
            parts.append(f"{curve.name} {ends}, {most}")
    return f"{chart.title}: {'; '.join(parts)}. Arrow keys show each value."
