"""What is said of tensors of one step of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from swaptrain.verbs.inspection.statistics import Histogram, Statistics

__all__ = ["FROZEN_SLOT", "NamedTensors", "Part", "TensorPlace", "TensorReport"]

FROZEN_SLOT = "frozen"
"""Stands for the slot of what is never rewritten."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies, or a part of it such as a master's lower half."""

    array: str
    dtype: str
    slot: str
    """`FROZEN_SLOT` where it is never rewritten; empty where it is a constant of the run."""
    offset: int
    """Elements of the array before it."""
    path: str
    """The array's directory; its chunks are files of it."""
    chunks: tuple[int, int]
    """First and last chunk that it lies in."""


@dataclass(frozen=True)
class Part:
    """The figures of what a run has of a tensor: the weights, their master, a state tensor."""

    name: str
    """`weights`, `master`, or the name that the optimizer gives it."""
    dtype: str
    """That of the numbers which were read."""
    form: str
    """How it lies on the disk."""
    found: Statistics
    histogram: Histogram | None = None


@dataclass(frozen=True)
class TensorReport:
    """A tensor of one step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    """`trained`, `frozen`, `buffer` (which forwards change) or `constant buffer`."""
    segment: int | None
    module: str | None
    """Path of the module that the segment covers."""
    places: tuple[TensorPlace, ...]
    parts: tuple[Part, ...]
    """The weights first."""

    def tree(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        parts = {}
        for part in self.parts:
            drawn = None if part.histogram is None else asdict(part.histogram)
            own = {"dtype": part.dtype, "form": part.form, **part.found.tree()}
            parts[part.name] = {**own, "histogram": drawn}
        own = {name: value for name, value in vars(self).items() if name not in ("places", "parts")}
        return {**own, "places": [asdict(place) for place in self.places], "parts": parts}


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of one step that a name or a glob means."""

    run: str
    step: int
    tensors: tuple[TensorReport, ...]
    is_glob: bool
