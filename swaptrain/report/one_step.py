"""The section of one step: its lanes, whose state was in memory, and what its instructions held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swaptrain.report.chart import Chart, Curve, Grid, said
from swaptrain.report.lanes import busy_s, lanes_of
from swaptrain.report.read import RunFiles
from swaptrain.report.section import Panel, ReportSection, group_of
from swaptrain.report.timeline import Hits, StepTrace
from swaptrain.units import format_duration

__all__ = ["instructions_chart", "one_step"]

_MOST_TRACED = 6
"""Steps of a trace that are shown."""
_MOST_INSTRUCTIONS = 1_000
_HELD_COLORS = {
    "weights": 1,
    "state": 3,
    "gradients": 2,
    "values": 5,
    "saved": 6,
    "cache": 7,
    "staging": 4,
    "torch": 9,
}


def one_step(runs: Sequence[RunFiles]) -> ReportSection:
    """Return the timeline of each traced step, run by run."""
    groups = []
    for run in runs:
        steps = _traced(run)
        text = ""
        if not steps:
            reason = run.trace.problem if run.trace is not None else None
            text = f"{reason}. " if reason else "This run has no trace. "
            text += "run.trace=5 records the next five steps of a run."
        elif run.trace is not None and len(steps) < len(run.trace.steps):
            text = f"{len(steps)} of the {len(run.trace.steps)} steps that were traced are shown."
        panels = [_panel(step) for step in steps]
        groups.append(group_of(runs, run, text[:1].upper() + text[1:], panels=panels))
    return ReportSection(
        "step",
        "One step",
        "Who was busy when, from trace.json. Reads and writes: how many are under way at once.",
        groups,
    )


def _traced(run: RunFiles) -> list[StepTrace]:
    """Return the steps to show: the first, the last and the longest among them."""
    steps = run.trace.steps if run.trace is not None else []
    if len(steps) <= _MOST_TRACED:
        return steps
    chosen = set(np.linspace(0, len(steps) - 1, _MOST_TRACED - 1).round().astype(int).tolist())
    chosen.add(max(range(len(steps)), key=lambda k: steps[k].seconds))
    return [steps[k] for k in sorted(chosen)]


def _panel(step: StepTrace) -> Panel:
    lanes = {
        "computing": step.computing,
        "waiting for the disk": step.waiting,
        "reads": step.reads,
        "writes": step.writes,
        "commits": step.commits,
    }
    rows = []
    for name, busy in lanes.items():
        seconds, nbytes = busy_s(busy), sum(b.nbytes for b in busy)
        cells = [name, f"{len(busy):,}", format_duration(seconds), f"{seconds / step.seconds:.0%}"]
        rows.append([*cells, said(nbytes, "bytes") if nbytes else ""])
    grid = Grid(["", "how many", "under way", "of the step", "bytes"], rows)
    segments = sorted(step.forward.keys() | step.backward.keys())
    if not segments:
        return Panel(lanes_of(step), grid, [], None)
    charts = [
        _hits_chart("State that forwards used", segments, step.forward),
        _hits_chart("State that backwards and updates used", segments, step.backward),
    ]
    table = [
        [str(k), *(text for side in (step.forward, step.backward) for text in _hits_texts(side, k))]
        for k in segments
    ]
    head = ["segment", "forward: in RAM", "read", "backward, update: in RAM", "read"]
    return Panel(lanes_of(step), grid, charts, Grid(head, table))


def _hits_chart(title: str, segments: Sequence[int], side: dict[int, Hits]) -> Chart:
    x = np.array(segments, dtype=float)
    found = np.array([side.get(k, Hits()).found_bytes for k in segments], dtype=float)
    read = np.array([side.get(k, Hits()).read_bytes for k in segments], dtype=float)
    curves = [Curve("found in RAM", x, found, 3), Curve("read from the disk", x, read, 5)]
    return Chart(title, "bytes", curves, "position", "bars")


def _hits_texts(side: dict[int, Hits], segment: int) -> list[str]:
    hits = side.get(segment)
    if hits is None:
        return ["", ""]
    return [said(hits.found_bytes, "bytes"), said(hits.read_bytes, "bytes")]


def instructions_chart(run: RunFiles, *, wide: bool) -> Chart | None:
    """Return what held memory over the instructions of a step; of many, each nth is drawn."""
    memory = run.memory
    if memory is None or not len(memory):
        return None
    chosen = np.arange(len(memory))
    note = ""
    if len(memory) > _MOST_INSTRUCTIONS:
        chosen = np.linspace(0, len(memory) - 1, _MOST_INSTRUCTIONS).round().astype(int)
        note = f"{_MOST_INSTRUCTIONS:,} of {len(memory):,} instructions are drawn."
    x = np.arange(len(chosen), dtype=float)
    parts = {**memory.held, "torch": memory.torch}
    curves = [
        Curve(name, x, values[chosen], _HELD_COLORS[name])
        for name, values in parts.items()
        if np.nan_to_num(values).any()
    ]
    beyond = memory.resident[chosen] - (memory.base_bytes if memory.base_bytes > 0 else 0.0)
    if np.isfinite(beyond).any():
        curves.append(Curve("resident beyond the base", x, beyond, 8, dashed=True))
    if memory.budget_bytes > 0:
        curves.append(Curve("memory.host", x, np.full(len(x), memory.budget_bytes), 7, dashed=True))
    if not curves:
        return None
    step = "a step" if memory.step is None else f"step {memory.step}"
    names = [memory.names[k] for k in chosen]
    title = f"What held memory over the instructions of {step}"
    return Chart(title, "bytes", curves, "position", "stack", note=note, wide=wide, x_names=names)
