"""The first lines of a report: the numbers that matter most, what ran where, and what differs."""

from __future__ import annotations

import numpy as np

from swaptrain.report.chart import Grid, said
from swaptrain.report.measured import median
from swaptrain.report.read import RunFiles
from swaptrain.units import format_duration, format_size, format_wear

__all__ = ["differing_keys", "facts", "figures"]

_NAMES = {
    "processor": "processor",
    "device": "device",
    "device name": "device's name",
    "threads": "threads",
    "kernels": "kernels",
    "host": "host",
}
_PACKAGES = ("swaptrain", "torch", "transformers", "python")


def figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the numbers of a run: a name, the number, and what belongs to it."""
    rows = run.rows
    found = [("steps", _steps(run), run.state.text if not len(rows) else "")]
    if not len(rows):
        return found
    loss, step_s = rows["loss"], rows["step_s"]
    known = loss[np.isfinite(loss)]
    if len(known):
        begin = f"from {said(float(known[0]), 'number')}" if len(known) > 1 else ""
        found.append(("loss", said(float(known[-1]), "number"), begin))
    held_out = rows["eval_loss"][np.isfinite(rows["eval_loss"])]
    if len(held_out):
        text = f"lowest {said(float(held_out.min()), 'number')}" if len(held_out) > 1 else ""
        found.append(("held-out loss", said(float(held_out[-1]), "number"), text))
    took = median(np.where(step_s > 0, step_s, np.nan))
    found.append(("a step", said(took, "seconds"), "median"))
    share = median(rows["roofline_fraction"])
    if np.isfinite(share):
        found.append(("floor / time", said(share, "share"), "median"))
    total_s = float(np.nansum(step_s))
    if total_s > 0:
        waited = float(np.nansum(rows["io_wait_s"])) / total_s
        found.append(("waiting for the disk", said(waited, "share"), "of all steps' time"))
    peak = rows["peak_host_bytes"][np.isfinite(rows["peak_host_bytes"])]
    if len(peak) and peak.max() > 0:
        host_bytes = run.state.host_bytes
        budget = "" if host_bytes is None else f"of {format_size(host_bytes)}"
        found.append(("most memory", format_size(float(peak.max())), budget))
    written = float(np.nansum(rows["write_bytes"]))
    found.append(("written", format_wear(written), f"in {format_duration(total_s)}"))
    return found


def _steps(run: RunFiles) -> str:
    done = f"{run.rows.steps[-1]:,.0f}" if len(run.rows) else "0"
    last = run.state.last_step
    return done if last is None else f"{done} of {last:,}"


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """Return what ran, and where, as far as it is known."""
    found = list(run.state.facts)
    texts = dict(run.starts[-1].texts) if run.starts else dict(run.state.machine)
    packages = [f"{name} {texts[name]}" for name in _PACKAGES if name in texts]
    if packages:
        found.append(("versions", ", ".join(packages)))
    for key, name in _NAMES.items():
        if key in texts and not (key == "device name" and texts[key] == texts.get("device")):
            found.append((name, texts[key]))
    return found


def differing_keys(first: RunFiles, second: RunFiles) -> Grid:
    """Return the keys of two configs whose values differ, with both values."""
    keys = [*first.config, *(key for key in second.config if key not in first.config)]
    rows = [
        [key, first.config.get(key, "not there"), second.config.get(key, "not there")]
        for key in keys
        if first.config.get(key) != second.config.get(key)
    ]
    return Grid(["key", first.label, second.label], rows)
