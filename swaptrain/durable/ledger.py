"""The numbers of a step so far, which every record of the step repeats: losses and norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple

from swaptrain.compute.loss_scale import LossScale

__all__ = ["Ledger"]


class Ledger:
    """What a step has found so far, and every record of it repeats: losses and norms."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        """By micro-batch."""
        self.norms: dict[str, float] = {}
        """By parameter: the 2-norm of its gradient before clipping."""
        self.scale: LossScale | None = None
        """Of the step's loss, in float16."""

    @property
    def overflowed(self) -> bool:
        """Whether a gradient of the step was not finite, in float16: it is not updated then."""
        return self.scale is not None and not all(map(math.isfinite, self.norms.values()))

    def next_scale(self) -> LossScale | None:
        """Return the scale of the next step; None where losses are not scaled."""
        return None if self.scale is None else self.scale.next(overflowed=self.overflowed)

    def recorded_scale(self) -> list[float] | None:
        """Return what a record says of the scale."""
        return None if self.scale is None else [*astuple(self.scale)]

    def in_order(self) -> list[float]:
        """Return the losses in the order of the micro-batches."""
        return [self.losses[m] for m in sorted(self.losses)]

    def of(self, names: Iterable[str]) -> dict[str, float]:
        """Return the norms of these parameters, as far as they are known."""
        return {name: self.norms[name] for name in names if name in self.norms}
