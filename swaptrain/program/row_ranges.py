"""Ranges of rows: parts of a parameter along its first dimension that are stored by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["WHOLE", "RangeSizes", "RowRange", "range_of", "row_ranges"]

_NAME = re.compile(r"(?P<whole>.+)\[(?P<first>\d{1,18}):(?P<end>\d{1,18})\]", re.DOTALL)


@dataclass(frozen=True)
class RangeSizes:
    """How much a range holds at the most."""

    experts: int | None = None
    """Of a stack of experts; None: stacks are whole."""
    rows: int | None = None
    """Of an embedding; None: embeddings are whole."""


WHOLE = RangeSizes()
"""Nothing is divided."""


@dataclass(frozen=True)
class RowRange:
    """Rows `first` to `end`, this one not included: experts of a stack, or rows of an embedding."""

    whole: str
    """Name of the parameter in the model."""
    first: int
    end: int

    @property
    def name(self) -> str:
        """Name of the range, as of a parameter."""
        return f"{self.whole}[{self.first}:{self.end}]"

    @property
    def count(self) -> int:
        """Rows in the range."""
        return self.end - self.first


def row_ranges(whole: str, rows: int, most: int) -> Iterator[RowRange]:
    """Yield the ranges of a parameter of so many rows, `most` in each but the last."""
    for first in range(0, rows, most):
        yield RowRange(whole, first, min(first + most, rows))


def range_of(name: str) -> RowRange | None:
    """Return the range that a name is of; None where it is that of a whole parameter."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return RowRange(found["whole"], int(found["first"]), int(found["end"]))
