"""What a report is made of: sections, and what is under a heading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swaptrain.report.chart import Chart, Grid
from swaptrain.report.lanes import Lanes
from swaptrain.report.read import RunFiles, Sample

__all__ = ["Panel", "ReportSection", "SectionGroup", "group_of"]


@dataclass(frozen=True)
class Panel:
    """One step of a trace."""

    lanes: Lanes
    grid: Grid
    hits: list[Chart]
    hits_grid: Grid | None


@dataclass(frozen=True)
class SectionGroup:
    """What belongs to one run, or to both where `title` is empty."""

    title: str = ""
    number: int = 0
    """Of the run, from 1, where there are two: its colour."""
    text: str = ""
    charts: Sequence[Chart] = ()
    grids: Sequence[Grid] = ()
    panels: Sequence[Panel] = ()
    samples: Sequence[tuple[int, Sequence[Sample]]] = ()
    """By step, the last one first."""


@dataclass(frozen=True)
class ReportSection:
    """A heading and what is under it."""

    name: str
    """In the address of the page."""
    title: str
    text: str = ""
    groups: Sequence[SectionGroup] = field(default=())


def group_of(
    runs: Sequence[RunFiles], run: RunFiles, text: str = "", **content: Any
) -> SectionGroup:
    """Return what belongs to one run, under its name where there are two."""
    if len(runs) == 1:
        return SectionGroup(text=text, **content)
    return SectionGroup(run.label, 1 + runs.index(run), text, **content)
