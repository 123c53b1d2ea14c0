"""Names of ranges of experts: rows of a stacked parameter that are stored by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ExpertRange", "expert_ranges", "range_of"]

_NAME = re.compile(r"(?P<whole>.+)\[(?P<first>\d{1,9}):(?P<end>\d{1,9})\]", re.DOTALL)


@dataclass(frozen=True)
class ExpertRange:
    """Experts `first` to `end`, this one not included, of a parameter that stacks them."""

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
        """Experts in the range."""
        return self.end - self.first


def expert_ranges(whole: str, experts: int, most: int) -> Iterator[ExpertRange]:
    """Yield the ranges of a parameter of so many experts, `most` in each but the last."""
    for first in range(0, experts, most):
        yield ExpertRange(whole, first, min(first + most, experts))


def range_of(name: str) -> ExpertRange | None:
    """Return the range that a name is of; None where it is that of a whole parameter."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return ExpertRange(found["whole"], int(found["first"]), int(found["end"]))
