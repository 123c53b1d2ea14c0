"""The sections of a report, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swaptrain.report.figures import Bound, Quantity, over_steps, parts_over_steps
from swaptrain.report.measured import floor_s, least_traffic, moved, rest_s, total_written
from swaptrain.report.one_step import instructions_chart, one_step
from swaptrain.report.read import RunFiles
from swaptrain.report.rows import Column
from swaptrain.report.section import ReportSection, SectionGroup, group_of
from swaptrain.report.story import forecast, samples, starts
from swaptrain.units import format_wear

__all__ = ["sections"]


def sections(runs: Sequence[RunFiles]) -> list[ReportSection]:
    """Return the sections of one run, or of two side by side."""
    found = [
        _learning(runs),
        _time(runs),
        one_step(runs),
        _disk(runs),
        _memory(runs),
        forecast(runs),
        starts(runs),
    ]
    if any(run.samples for run in runs):
        found.append(samples(runs))
    return found


_BEFORE = "eval_loss_before"


def _row(name: str) -> Quantity:
    before = f"{name}_before" if name.startswith("eval_") else None
    return Quantity(name, lambda run: run.rows[name], before=before)


def _learning(runs: Sequence[RunFiles]) -> ReportSection:
    losses = [
        Quantity("loss", lambda run: run.rows["loss"], "Loss"),
        Quantity("held-out loss", lambda run: run.rows["eval_loss"], "Held-out loss", _BEFORE),
    ]
    charts = over_steps(runs, "Loss", "number", losses, from_zero=False)
    charts += over_steps(runs, "Learning rate", "number", [_row("lr")])
    charts += over_steps(runs, "Gradient norm, before clipping", "number", [_row("grad_norm")])
    for name in _held_out_names(runs):
        shown = name.removeprefix("eval_").replace("_", " ")
        charts += over_steps(runs, f"Held-out {shown}", "number", [_row(name)], from_zero=False)
    if not charts:
        return ReportSection("learning", "Learning", "No step is done yet.")
    return ReportSection("learning", "Learning", groups=[SectionGroup(charts=charts)])


def _held_out_names(runs: Sequence[RunFiles]) -> list[str]:
    names = {name for run in runs for name in run.rows.columns if name.startswith("eval_")}
    names -= {"eval_loss"}
    return sorted(name for name in names if not name.endswith("_before"))[:8]


def _time(runs: Sequence[RunFiles]) -> ReportSection:
    parts = [
        Quantity("forward and backward", lambda run: run.rows["compute_s"]),
        Quantity("update", lambda run: run.rows["update_s"]),
        Quantity("waiting for the disk", lambda run: run.rows["io_wait_s"]),
        Quantity("waiting for data", lambda run: run.rows["data_wait_s"]),
        Quantity("the rest", rest_s),
    ]
    floor = Bound("floor", floor_s)
    charts = parts_over_steps(
        runs, "Where a step's time went", "seconds", parts, (1, 3, 2, 5, 7), floor
    )
    charts += over_steps(
        runs,
        "Share of the floor",
        "share",
        [Quantity("floor / time", lambda run: run.rows["roofline_fraction"])],
    )
    charts += over_steps(runs, "Time of a step", "seconds", [_row("step_s")])
    per_s = [Quantity("tokens a second", lambda run: _rate(run))]
    charts += over_steps(runs, "Tokens a second", "number", per_s)
    text = (
        "The floor is the least time that this disk and this processor need for what the step "
        "moved and computed (roofline_fraction). Without a measured disk there is none."
    )
    return ReportSection("time", "Time", text, [SectionGroup(charts=charts)] if charts else [])


def _rate(run: RunFiles) -> Column:
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = run.rows["tokens"] / run.rows["step_s"]
    return np.where(run.rows["step_s"] > 0, rate, np.nan)


def _disk(runs: Sequence[RunFiles]) -> ReportSection:
    quantities = [
        Quantity("read", lambda run: run.rows["read_bytes"], "Read in a step"),
        Quantity("written", lambda run: run.rows["write_bytes"], "Written in a step"),
        Quantity("both", moved, "Read and written in a step"),
    ]
    least = Bound("least for both" if len(runs) == 1 else "least", least_traffic)
    charts = over_steps(runs, "Bytes that a step moved", "bytes", quantities, bound=least)
    charts += over_steps(
        runs, "Written so far", "bytes", [Quantity("written so far", total_written)]
    )
    charts += over_steps(
        runs,
        "Found in RAM",
        "share",
        [Quantity("of the bytes asked for", lambda run: run.rows["cache_hit_fraction"])],
    )
    wear = [
        f"{run.label if len(runs) > 1 else 'The run'} has written "
        f"{format_wear(float(np.nansum(run.rows['write_bytes'])))}."
        for run in runs
        if len(run.rows)
    ]
    text = (
        "The lower bound is that of any schedule that goes through the layers once forwards and "
        "once backwards, with the same memory as a cache. " + " ".join(wear)
    )
    return ReportSection("disk", "Disk", text, [SectionGroup(charts=charts)] if charts else [])


def _budget(run: RunFiles) -> Column:
    host_bytes = run.state.host_bytes
    return np.full(len(run.rows), np.nan if host_bytes is None else float(host_bytes))


def _memory(runs: Sequence[RunFiles]) -> ReportSection:
    peak = [Quantity("peak beyond the base", lambda run: run.rows["peak_host_bytes"])]
    budget = Bound("memory.host", _budget)
    charts = over_steps(runs, "Most memory in a step", "bytes", peak, bound=budget)
    device = [Quantity("peak", lambda run: run.rows["peak_device_bytes"])]
    charts += over_steps(runs, "Most of the device's memory in a step", "bytes", device)
    groups = [SectionGroup(charts=charts)] if charts else []
    for run in runs:
        found = instructions_chart(run, wide=len(runs) == 1)
        if found is not None:
            groups.append(group_of(runs, run, charts=[found]))
        else:
            text = "run.memory=true records what held memory at each instruction of a step."
            groups.append(group_of(runs, run, text))
    return ReportSection("memory", "Memory", groups=groups)
