"""What differs between two runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["RunDifference", "TensorDifference"]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two runs have, with other bits."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    """As they were compared: parameters of 16 bits as their float32 masters."""
    elements: int = 0
    """0 where the shapes differ, and nothing was compared."""
    differing: int = 0
    largest: float = 0.0
    """Largest absolute difference of finite elements."""
    relative: float | None = None
    """Norm of the difference over the norm of the first run's tensor, of finite elements; None
    where that is zero."""
    not_finite: int = 0
    """Elements that differ and are not finite in one of the two."""

    def order(self) -> tuple[bool, bool, float, float, str]:
        """Return a key that sorts other shapes first, then what is not finite, then the largest."""
        relative = math.inf if self.relative is None else self.relative
        return bool(self.elements), not self.not_finite, -relative, -self.largest, self.name


@dataclass(frozen=True)
class RunDifference:
    """Two runs beside each other."""

    runs: tuple[str, str]
    steps: tuple[int, int]
    config: dict[str, tuple[Any, Any]]
    """By dotted key: the values of both."""
    compared: int
    """Tensors that both have."""
    differing: tuple[TensorDifference, ...]
    """The largest difference first."""
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names that only one of both has."""

    @property
    def is_equal(self) -> bool:
        """Whether both have the same tensors, with the same bits."""
        return not self.differing and not any(self.only)

    def tree(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "equal": self.is_equal}
