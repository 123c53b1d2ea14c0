"""The numbers of a step so far, which every record of the step repeats: losses and norms."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Ledger"]


class Ledger:
    """What a step has found so far, and every record of it repeats: losses and norms."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        """By micro-batch."""
        self.norms: dict[str, float] = {}
        """By parameter: the 2-norm of its gradient before clipping."""

    def in_order(self) -> list[float]:
        """Return the losses in the order of the micro-batches."""
        return [self.losses[m] for m in sorted(self.losses)]

    def of(self, names: Iterable[str]) -> dict[str, float]:
        """Return the norms of these parameters, as far as they are known."""
        return {name: self.norms[name] for name in names if name in self.norms}
