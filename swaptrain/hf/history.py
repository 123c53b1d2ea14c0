"""What a Trainer's state says of a run: the rows of metrics.jsonl in its words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swaptrain.hf.arguments import Frequency
from swaptrain.hf.order import EpochShape

__all__ = ["Best", "History", "MetricsRow", "best_of"]

MetricsRow = Mapping[str, Any]


@dataclass(frozen=True)
class Best:
    """The evaluation of the lowest loss, the first of several."""

    step: int
    loss: float


@dataclass(frozen=True)
class History:
    """Makes `log_history` of the rows of a run."""

    shape: EpochShape
    logs: Frequency
    first: bool
    """logging_first_step."""
    last: int

    def entries(self, rows: Sequence[MetricsRow]) -> list[dict[str, Any]]:
        """Return the entries of `log_history`; a loss is the mean since the entry before."""
        found: list[dict[str, Any]] = []
        losses: list[float] = []
        for row in rows:
            step = row["step"]
            place = {"epoch": self.shape.epoch_of(step), "step": step}
            found += _evaluation(row, "_before", {"epoch": 0, "step": 0})
            losses.append(row["loss"])
            at_end = self.logs.strategy == "epoch" and step == self.last
            if self.logs.due(step) or at_end or (self.first and step == 1):
                found.append(
                    {
                        "loss": math.fsum(losses) / len(losses),
                        "grad_norm": row["grad_norm"],
                        "learning_rate": row["lr"],
                        **place,
                    }
                )
                losses = []
            found += _evaluation(row, "", place)
        return found

    def summary(self, rows: Sequence[MetricsRow]) -> dict[str, Any]:
        """Return the last entry of a run: seconds are those of its steps."""
        seconds = sum(row["step_s"] for row in rows)
        samples = self.shape.taken * self.shape.epoch_of(self.last)
        return {
            "train_runtime": seconds,
            "train_samples_per_second": samples / seconds if seconds else None,
            "train_steps_per_second": self.last / seconds if seconds else None,
            "train_loss": math.fsum(row["loss"] for row in rows) / len(rows),
            "epoch": self.shape.epoch_of(self.last),
            "step": self.last,
        }


def _evaluation(row: MetricsRow, end: str, place: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = {
        key.removesuffix(end): value
        for key, value in row.items()
        if key.startswith("eval_") and key.endswith("_before") == bool(end)
    }
    return [{**found, **place}] if found else []


def best_of(rows: Sequence[MetricsRow]) -> Best | None:
    """Return the evaluation of the lowest loss; None where none is a number."""
    found = [
        Best(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None
    ]
    return min(found, key=lambda best: best.loss, default=None)
