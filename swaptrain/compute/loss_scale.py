"""Dynamic loss scaling for float16: torch's GradScaler, as a function of the steps before."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossScale"]

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
_MOST = 2.0**127
"""torch keeps the scale in float32, and it does not grow to infinity."""


@dataclass(frozen=True)
class LossScale:
    """What the loss of one step is multiplied by, and what led to it.

    The numbers are those of `torch.amp.GradScaler` with its defaults.
    """

    scale: float = 65536.0
    good: int = 0
    """Steps before this one, since the scale is what it is, whose gradients were finite."""
    skipped: int = 0
    """Updates of earlier steps that were left out, since a gradient was not finite."""

    def next(self, *, overflowed: bool) -> LossScale:
        """Return that of the next step; `overflowed`: a gradient of this one was not finite."""
        if overflowed:
            return LossScale(self.scale * _BACKOFF, 0, self.skipped + 1)
        if self.good + 1 < _INTERVAL:
            return LossScale(self.scale, self.good + 1, self.skipped)
        grown = self.scale * _GROWTH
        return LossScale(grown if grown <= _MOST else self.scale, 0, self.skipped)
