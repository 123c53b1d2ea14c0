"""Which steps a run keeps as snapshots: the newest of every so many, and those of lowest loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Keeping"]


@dataclass(frozen=True)
class Keeping:
    """`store.keep`; steps are numbers, `losses` the held-out losses of steps that have one."""

    every: int | None
    last: int
    best: int | None = None

    @property
    def count(self) -> int:
        """The most snapshots that are kept at a time."""
        return (self.last if self.every is not None else 0) + (self.best or 0)

    def is_due(self, step: int, kept: Sequence[int], losses: Mapping[int, float]) -> bool:
        """Whether `step` is to be kept, beside those that are: no later step was done."""
        if step <= 0 or step in kept:
            return False
        return self._is_regular(step) or step in self._best([*kept, step], losses)

    def surplus(self, kept: Sequence[int], losses: Mapping[int, float]) -> set[int]:
        """Return those of the `kept` steps, in ascending order, that are not wanted any more."""
        regular = [step for step in kept if self._is_regular(step) or step not in losses]
        wanted = set(regular[-self.last :]) if self.every is not None else set()
        return {*kept} - wanted - self._best(kept, losses)

    def _is_regular(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def _best(self, steps: Sequence[int], losses: Mapping[int, float]) -> set[int]:
        """Return those of lowest loss; of two that are as low, the earlier one."""
        found = sorted((losses[step], step) for step in steps if step in losses)
        return {step for _, step in found[: self.best or 0]}
