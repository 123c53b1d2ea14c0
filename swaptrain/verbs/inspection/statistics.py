"""Figures of a tensor whose elements come in pieces: one pass for all but the histogram."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_ELEMENTS", "Histogram", "Statistics", "flat", "histogram", "json_number"]
__all__ += ["statistics"]

BLOCK_ELEMENTS = 2**19
"""Elements that are widened at once."""
_SHOWN = 4
"""Elements that are kept of each end."""
_BINS = 16


@dataclass(frozen=True)
class Statistics:
    """Figures of a tensor, in float64; those that need numbers are of its finite elements.

    Of a complex tensor the real and the imaginary parts are taken together.
    """

    count: int
    least: float | None
    """None of this and the next four where no element is finite."""
    most: float | None
    mean: float | None
    std: float | None
    """Root of the mean squared distance from the mean."""
    norm: float | None
    """Root of the sum of squares."""
    zeros: int
    nan: int
    infinite: int
    first: tuple[float, ...]
    last: tuple[float, ...]

    @property
    def not_finite(self) -> int:
        """Elements that are NaN or infinite."""
        return self.nan + self.infinite

    def tree(self) -> dict[str, Any]:
        """Return them as JSON has them; null stands for a number that is not finite."""
        found = {**asdict(self), "min": self.least, "max": self.most}
        del found["least"], found["most"]
        ends = {end: [json_number(value) for value in found[end]] for end in ("first", "last")}
        return {**found, **ends}


@dataclass(frozen=True)
class Histogram:
    """How many of the finite elements lie between each two edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass
class _Sums:
    """What a pass over the pieces adds up."""

    count: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""
    square_sum: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    def add(self, piece: NDArray[np.float64]) -> None:
        """Add a piece that is not empty."""
        self.first += piece[: max(0, _SHOWN - len(self.first))].tolist()
        self.last = [*self.last, *piece[-_SHOWN:].tolist()][-_SHOWN:]
        self.count += len(piece)
        self.zeros += len(piece) - int(np.count_nonzero(piece))
        values, squares = piece, float(piece @ piece)
        if not math.isfinite(squares):  # else all elements are finite, and need no second look
            good = np.isfinite(piece)
            nan = int(np.count_nonzero(np.isnan(piece)))
            self.nan += nan
            self.infinite += len(piece) - int(np.count_nonzero(good)) - nan
            values = piece[good]
            squares = float(values @ values)
        if not len(values):
            return
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        self.square_sum += squares
        # Chan, Golub, LeVeque 1979: means and squares of two parts make those of the whole.
        own_mean = float(values.mean())
        away = values - own_mean
        own = float(away @ away)
        total = self.finite + len(values)
        apart = own_mean - self.mean
        self.squares += own + apart * apart * self.finite * len(values) / total
        self.mean += apart * len(values) / total
        self.finite = total


def statistics(pieces: Iterable[NDArray[Any]]) -> Statistics:
    """Return the figures of all pieces; reads each once."""
    sums = _Sums()
    with np.errstate(over="ignore", invalid="ignore"):
        for values in _blocks(pieces):
            sums.add(values)
    some = sums.finite > 0
    return Statistics(
        count=sums.count,
        least=sums.least if some else None,
        most=sums.most if some else None,
        mean=json_number(sums.mean) if some else None,
        std=json_number(math.sqrt(sums.squares / sums.finite)) if some else None,
        norm=json_number(math.sqrt(sums.square_sum)) if some else None,
        zeros=sums.zeros,
        nan=sums.nan,
        infinite=sums.infinite,
        first=tuple(sums.first),
        last=tuple(sums.last),
    )


def histogram(pieces: Iterable[NDArray[Any]], found: Statistics) -> Histogram | None:
    """Return the histogram of a tensor whose figures are known; None where all are one number."""
    if found.least is None or found.most is None or found.least == found.most:
        return None
    parts = np.linspace(0, 1, _BINS + 1)
    bins = found.least * (1 - parts) + found.most * parts  # their distance may overflow
    counts = np.zeros(_BINS, np.int64)
    wide = not math.isfinite(found.most - found.least)
    if not np.all(bins[1:] > bins[:-1]):  # neighbours of so narrow a range are one number
        return None
    for values in _blocks(pieces):
        good = values if not found.not_finite else values[np.isfinite(values)]
        edges: Any = bins if wide else _BINS  # as many equal ones are found by reckoning
        counts += np.histogram(good, edges, None if wide else (found.least, found.most))[0]
    return Histogram(tuple(bins.tolist()), tuple(counts.tolist()))


def _blocks(pieces: Iterable[NDArray[Any]]) -> Iterator[NDArray[np.float64]]:
    """Yield all elements as float64, so few at a time that what is computed of them is small."""
    for piece in pieces:
        elements = flat(piece)
        for start in range(0, len(elements), BLOCK_ELEMENTS):
            yield elements[start : start + BLOCK_ELEMENTS].astype(np.float64)


def flat(piece: NDArray[Any]) -> NDArray[Any]:
    """Return the elements of a piece in one dimension, complex ones as pairs of numbers."""
    elements = np.ascontiguousarray(piece).reshape(-1)
    if np.iscomplexobj(elements):
        return elements.view(elements.real.dtype)
    return elements


def json_number(value: float) -> float | None:
    """Return the number, or None where it is not finite, which JSON cannot say."""
    return value if math.isfinite(value) else None
