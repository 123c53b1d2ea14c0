"""The one line of a step that a person can act on, and the line where a step is resumed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.program.instructions import Kind, ObjectKey, Operation, Program
from swaptrain.units import GIB, MIB, format_duration, format_size, format_wear

__all__ = ["Counted", "RunSoFar", "progress_line", "resume_line"]

Counted = Literal["tok", "items"]
"""What `StepMetrics.tokens` counts: tokens, or items of data without tokens."""

_WORTH = 10 * 10**9
"""Bytes that a run writes in all, from which on a drive's life is worth a word."""


@dataclass(frozen=True, kw_only=True)
class RunSoFar:
    """What the line of a step says of the run around it."""

    total_steps: int
    counted: Counted = "tok"
    host_budget_bytes: int | None = None
    mean_loss: float | None = None
    """Of the last steps; None where there is only one."""
    eta_s: float | None = None
    written_bytes: int = 0
    """So far; with those of the steps to come they are what the run takes of a drive's life."""
    to_come_bytes: float = 0


def progress_line(metrics: StepMetrics, run: RunSoFar, *, columns: int | None = None) -> str:
    """Return the line of a finished step; what was not measured is left out.

    `step 12/200 | loss 3.2141 | mean 3.3105 | 41.2 s | 1,640 tok/s | eta 2.1 h | waiting for disk
    8% | 910.0 GB of 15.24 TB written | RAM 21.7/24 GiB, hit 63% | read 96.0 GiB at 2.9 GiB/s |
    wrote 71.0 GiB | epoch 0.31 | lr 0.001`

    The most important comes first. What does not fit in `columns` is left out from the end, the
    step and its loss never. A drive's life is shown from 10 GB on.
    """
    parts = list(_parts(metrics, run))
    line = " | ".join(parts)
    while columns is not None and len(line) > columns and len(parts) > 2:
        parts.pop()
        line = " | ".join(parts)
    return line


def resume_line(
    program: Program, step: int, found: Collection[ObjectKey], *, top: int | None, segments: int
) -> str:
    """Return the line where a step is resumed: its segment, and the forwards that are done again.

    `program` is what is left of the step, `found` what an earlier process left of its forwards,
    `top` the segment whose backward comes next, if the step was killed in its backward.
    """
    left = [(i.segment, i.micro_batch) for i in program if i.operation is Operation.FORWARD]
    if top is not None:
        return (
            f"going on in step {step} with the backward of segment {top}/{segments}; "
            f"forwards done again: {len(left)}"
        )
    reached = max((key.segment for key in found if key.kind is Kind.VALUE), default=0)
    if not reached:
        return f"going on with step {step}"
    begun = {(key.segment, key.micro_batch) for key in found}
    again = sum(1 for segment, m in left if segment < reached or (segment, m) in begun)
    following = f"forward of segment {left[0][0]}" if left else f"backward of segment {segments}"
    return f"going on in step {step} with the {following}/{segments}; forwards done again: {again}"


def _parts(metrics: StepMetrics, run: RunSoFar) -> Iterator[str]:
    step_s = max(metrics.step_s, 1e-9)
    yield f"step {metrics.step}/{run.total_steps}"
    yield f"loss {metrics.loss:.4f}"
    if metrics.skipped:
        yield f"overflow at scale {metrics.loss_scale:g}, skipped"
    if metrics.held_out is not None:
        yield metrics.held_out.text()
    if run.mean_loss is not None:
        yield f"mean {run.mean_loss:.4f}"
    yield format_duration(metrics.step_s)
    yield f"{_rate(metrics.tokens / step_s)} {run.counted}/s"
    if run.eta_s is not None and metrics.step < run.total_steps:
        yield f"eta {format_duration(run.eta_s)}"
    yield f"waiting for disk {metrics.io_wait_s / step_s:.0%}"
    wear = run.written_bytes + max(0, run.to_come_bytes)
    if metrics.write_bytes and wear >= _WORTH:
        yield f"{format_wear(run.written_bytes)} of {format_wear(wear)} written"
    if metrics.data_wait_s >= 0.01 * step_s:
        yield f"waiting for data {metrics.data_wait_s / step_s:.0%}"
    memory = []
    if metrics.peak_host_bytes:
        memory.append(f"RAM {_of_budget(metrics.peak_host_bytes, run.host_budget_bytes)}")
    if metrics.cache_hit_fraction is not None and math.isfinite(metrics.cache_hit_fraction):
        memory.append(f"hit {metrics.cache_hit_fraction:.0%}")
    if memory:
        yield ", ".join(memory)
    if metrics.peak_device_bytes:
        yield f"device {format_size(metrics.peak_device_bytes)}"
    if metrics.read_bytes:
        per_s = format_size(metrics.read_bytes / step_s)
        yield f"read {format_size(metrics.read_bytes)} at {per_s}/s"
    if metrics.write_bytes:
        yield f"wrote {format_size(metrics.write_bytes)}"
    if metrics.epoch:
        yield f"epoch {metrics.epoch:.2f}"
    yield f"lr {metrics.lr:.3g}"


def _rate(per_s: float) -> str:
    """Show a rate: whole numbers where they say enough, two digits below 10."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def _of_budget(used_bytes: int, budget_bytes: int | None) -> str:
    if not budget_bytes:
        return format_size(used_bytes)
    factor, unit = (GIB, "GiB") if budget_bytes >= GIB else (MIB, "MiB")
    return f"{used_bytes / factor:.1f}/{round(budget_bytes / factor, 1):g} {unit}"
