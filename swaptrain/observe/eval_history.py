"""The held-out losses of a run so far, and for how long the lowest has stood."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["EvalHistory"]


class EvalHistory:
    """Losses by step, in order; begun from the lines of metrics.jsonl."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.losses: dict[int, float] = {}
        """By step, those that are numbers."""
        self.lowest: tuple[int, float] | None = None
        """Step and loss."""
        self.waited = 0
        """Evaluations since the lowest loss. One that is not a number, or as low, is not lower."""
        for row in rows:
            if "eval_loss" in row:
                self.add(int(row["step"]), row["eval_loss"])

    def add(self, step: int, loss: float | None) -> None:
        """A step was evaluated; None, as a line has it, stands for a loss that is not finite."""
        if loss is None or not math.isfinite(loss):
            self.waited += self.lowest is not None
            return
        self.losses[step] = loss
        if self.lowest is None or loss < self.lowest[1]:
            self.lowest, self.waited = (step, loss), 0
        else:
            self.waited += 1

    def has_waited(self, patience: int | None) -> bool:
        """Whether the lowest loss has stood for so many evaluations."""
        return patience is not None and self.waited >= patience
