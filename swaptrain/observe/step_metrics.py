"""The numbers of one step: what metrics.jsonl keeps and the progress line shows."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from swaptrain.observe.eval_result import EvalResult

__all__ = ["StepMetrics", "time_stamp"]


def time_stamp() -> float:
    """Return seconds since 1970 (UTC), to the millisecond; a clock that jumps, never a duration."""
    return round(time.time(), 3)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step as it was done; seconds and bytes are those of the process that finished it."""

    step: int
    """From 1."""
    loss: float
    """Mean of the micro-batches' losses, or of the step's trained tokens."""
    lr: float
    """Learning rate of this step's update."""
    grad_norm: float | None = None
    """Global norm of the gradient before clipping; None where it was not formed."""
    tokens: int
    """Tokens (for data without tokens: items) of this step."""
    step_s: float
    """Wall-clock time of the step."""
    epoch: float = 0.0
    """How many times each item was taken, this step's included."""
    ended_at: float = 0.0
    """When it ended, in seconds since 1970 (UTC)."""
    compute_s: float = 0.0
    """Time in forward, recomputation and backward."""
    update_s: float = 0.0
    """Time in the optimizer."""
    io_wait_s: float = 0.0
    """Time in which the main line waited for the disk."""
    data_wait_s: float = 0.0
    """Time in which the main line waited for the step's data."""
    read_bytes: int = 0
    write_bytes: int = 0
    cache_hit_fraction: float | None = None
    """Bytes found in RAM / bytes asked for; None where nothing was asked for."""
    peak_host_bytes: int = 0
    """The most that was held of memory.host, or resident beyond the base, in this step."""
    peak_device_bytes: int | None = None
    """None on a CPU device."""
    roofline_fraction: float | None = None
    """The step's floor / its time (docs/design.md, "The cost of a step"); None: not known."""
    loss_scale: float | None = None
    """What the loss was multiplied by, in float16; the row has it only there."""
    skipped: bool = False
    """A gradient was not finite, in float16: the step changes no weight. Only where true."""
    held_out: EvalResult | None = None
    """After this step; the row has it, as `eval_...`, only where it was measured."""
    held_out_before: EvalResult | None = None
    """Before this step, as `eval_..._before`."""
    exchange_bytes: int | None = None
    """Bytes that this rank sent and received; None, and not in the row, where there is one."""
    exchange_wait_s: float | None = None
    """Time in which its main line waited for other ranks, or added their sums; likewise."""
    resumed: bool = False
    """Another process began this step; the row has it only where true."""

    def row(self) -> dict[str, Any]:
        """Return the row of metrics.jsonl."""
        row = asdict(self)
        del row["held_out"], row["held_out_before"]
        if self.held_out is not None:
            row |= self.held_out.row()
        if self.held_out_before is not None:
            row |= {f"{key}_before": value for key, value in self.held_out_before.row().items()}
        for key in ("resumed", "skipped"):
            if not row[key]:
                del row[key]
        for key in ("loss_scale", "exchange_bytes", "exchange_wait_s"):
            if row[key] is None:
                del row[key]
        return row
