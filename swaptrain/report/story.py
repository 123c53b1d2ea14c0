"""The sections of a run's life: what was forecast, its starts and interruptions, its samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swaptrain.report.chart import Chart, Curve, Grid, said
from swaptrain.report.measured import Gap, by_start, compared, gaps, median, start_marks
from swaptrain.report.read import RunFiles, Sample
from swaptrain.report.section import ReportSection, group_of
from swaptrain.units import format_duration

__all__ = ["forecast", "samples", "starts"]

_MOST_SAMPLED = 8
"""Steps whose samples are shown."""
_MOST_STARTS = 50


def forecast(runs: Sequence[RunFiles]) -> ReportSection:
    """Return what a start expected of a step, beside what its steps took."""
    groups = []
    for run in runs:
        found = compared(run)
        if found is None:
            text = (
                "The run has no steps of a start whose forecast is known (starts.jsonl)."
                if run.starts
                else "The run was begun by a version that did not record its forecast."
            )
            groups.append(group_of(runs, run, text))
            continue
        start, count, rows = found
        head = ["of a step", "forecast", "measured", "measured / forecast"]
        of = "one step" if count == 1 else f"{count:,} steps"
        grid = Grid(head, [row.texts() for row in rows])
        text = (
            f"Medians of {of} of the start of {said(start.time, 'time')} UTC, of memory the most; "
            "the first step of a start fills memory and is left out where there are others."
        )
        groups.append(group_of(runs, run, text, grids=[grid]))
    return ReportSection("forecast", "Forecast and measured", groups=groups)


def starts(runs: Sequence[RunFiles]) -> ReportSection:
    """Return when processes began, and when the run stood still."""
    groups = []
    for run in runs:
        ended = run.rows["ended_at"]
        if not np.isfinite(ended).any():
            groups.append(group_of(runs, run, "No step is done yet.", grids=_start_grid(run)))
            continue
        still = gaps(run)
        rows = [gap.row for gap in still]
        x = np.insert(ended, rows, [gap.begin + 1e-3 for gap in still])
        y = np.insert(run.rows.steps, rows, np.nan)
        chart = Chart(
            "Steps done over time",
            "step",
            [Curve("step", x, y, 1)],
            "time",
            marks=start_marks(run.starts),
            note="Dashed: a process began." if run.starts else "",
        )
        groups.append(
            group_of(runs, run, _stood(run, still), charts=[chart], grids=_start_grid(run))
        )
    return ReportSection("starts", "Starts and interruptions", groups=groups)


def _stood(run: RunFiles, still: Sequence[Gap]) -> str:
    took = float(np.nansum(run.rows["step_s"]))
    stood = sum(gap.end - gap.begin for gap in still)
    begun = max(1, len(run.starts))
    resumed = int(np.nansum(run.rows["resumed"]))
    text = f"{format_duration(took)} of steps in {begun} {'start' if begun == 1 else 'starts'}"
    if still:
        times = "once" if len(still) == 1 else f"{len(still)} times"
        text += f"; it stood still {times}, for {format_duration(stood)} in all"
    if resumed:
        text += f"; {resumed} {'step was' if resumed == 1 else 'steps were'} resumed inside"
    return text + "."


def _start_grid(run: RunFiles) -> list[Grid]:
    if not run.starts:
        return []
    head = ["began (UTC)", "host", "pid", "first step", "steps done", "forecast", "measured"]
    rows = []
    for start, done in list(zip(run.starts, by_start(run), strict=True))[-_MOST_STARTS:]:
        took = median(run.rows["step_s"][done])
        rows.append(
            [
                said(start.time, "time"),
                start.texts.get("host", "-"),
                start.texts.get("pid", "-"),
                said(start.first_step, "step"),
                f"{done.stop - done.start:,}",
                said(start.expects("step_s"), "seconds"),
                said(took, "seconds"),
            ]
        )
    left = len(run.starts) - len(rows)
    note = f"{left:,} earlier starts are left out" if left > 0 else ""
    return [Grid(head, rows, note)]


def samples(runs: Sequence[RunFiles]) -> ReportSection:
    """Return what the model wrote, the last step first."""
    groups = []
    for run in runs:
        by_step: dict[int, list[Sample]] = {}
        for sample in run.samples:
            by_step.setdefault(sample.step, []).append(sample)
        steps = sorted(by_step, reverse=True)
        shown = steps
        text = "" if steps else "No samples."
        if len(steps) > _MOST_SAMPLED:
            chosen = np.linspace(0, len(steps) - 1, _MOST_SAMPLED).round().astype(int)
            shown = [steps[k] for k in chosen]
            text = f"{len(shown)} of {len(steps):,} evaluations; samples.jsonl has all."
        pairs = [(step, by_step[step]) for step in shown]
        groups.append(group_of(runs, run, text, samples=pairs))
    return ReportSection("samples", "Samples", "What the model wrote (eval.samples).", groups)
