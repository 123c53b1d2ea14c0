"""The one line of a step that a person can act on."""

from __future__ import annotations

import math

from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.units import GIB, MIB, format_duration, format_size, format_wear

__all__ = ["progress_line"]

_WORTH = 10 * 10**9
"""Bytes that a run writes in all, from which on a drive's life is worth a word."""


def progress_line(
    metrics: StepMetrics,
    *,
    total_steps: int,
    host_budget_bytes: int | None = None,
    eta_s: float | None = None,
    written_bytes: int = 0,
    to_come_bytes: float = 0,
) -> str:
    """Return the line of a finished step; what was not measured is left out.

    `step 12/200 | loss 3.2141 | 41.2 s | 1,640 tok/s | read 96.0 GiB at 2.9 GiB/s | wrote 71.0 GiB,
    910.0 GB of 15.24 TB | RAM 21.7/24 GiB, hit 63% | waiting for disk 8% | eta 2.1 h`

    `written_bytes` are those of the run so far; with those of the steps to come they are what the
    run takes of a drive's life. Shown from 10 GB on.
    """
    step_s = max(metrics.step_s, 1e-9)
    parts = [f"step {metrics.step}/{total_steps}", f"loss {metrics.loss:.4f}"]
    if metrics.skipped:
        parts.append(f"overflow at scale {metrics.loss_scale:g}, skipped")
    if metrics.held_out is not None:
        parts.append(metrics.held_out.text())
    parts.append(format_duration(metrics.step_s))
    parts.append(f"{_rate(metrics.tokens / step_s)} tok/s")
    if metrics.read_bytes:
        per_s = format_size(metrics.read_bytes / step_s)
        parts.append(f"read {format_size(metrics.read_bytes)} at {per_s}/s")
    if metrics.write_bytes:
        wear = written_bytes + max(0, to_come_bytes)
        said = f", {format_wear(written_bytes)} of {format_wear(wear)}" if wear >= _WORTH else ""
        parts.append(f"wrote {format_size(metrics.write_bytes)}{said}")
    memory = []
    if metrics.peak_host_bytes:
        memory.append(f"RAM {_of_budget(metrics.peak_host_bytes, host_budget_bytes)}")
    if metrics.cache_hit_fraction is not None and math.isfinite(metrics.cache_hit_fraction):
        memory.append(f"hit {metrics.cache_hit_fraction:.0%}")
    if memory:
        parts.append(", ".join(memory))
    if metrics.peak_device_bytes:
        parts.append(f"device {format_size(metrics.peak_device_bytes)}")
    parts.append(f"waiting for disk {metrics.io_wait_s / step_s:.0%}")
    if metrics.data_wait_s >= 0.01 * step_s:
        parts.append(f"waiting for data {metrics.data_wait_s / step_s:.0%}")
    if eta_s is not None and metrics.step < total_steps:
        parts.append(f"eta {format_duration(eta_s)}")
    return " | ".join(parts)


def _rate(per_s: float) -> str:
    """Show a rate: whole numbers where they say enough, two digits below 10."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def _of_budget(used_bytes: int, budget_bytes: int | None) -> str:
    if not budget_bytes:
        return format_size(used_bytes)
    factor, unit = (GIB, "GiB") if budget_bytes >= GIB else (MIB, "MiB")
    return f"{used_bytes / factor:.1f}/{round(budget_bytes / factor, 1):g} {unit}"
