"""Checks on a micro-batch that are made before its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, fx

from swaptrain.errors import CaptureError

__all__ = ["BatchChecks", "OutputCheck", "Requirement"]

_MOST_CHARACTERS = 80
_ADVICE = (
    "All micro-batches have to agree in this: order, pad or crop the items so that they do, or "
    "leave these out"
)


class Requirement(Enum):
    """What is asked of an output of the checks' graph."""

    HOLDS = "all elements are true"
    VALUE = "it has the first micro-batch's value"
    SHAPE = "it has the shape that it has for the first micro-batch"


@dataclass(frozen=True)
class OutputCheck:
    """One output of the checks' graph, and what is asked of it."""

    kind: Requirement
    message: str
    """The model's own for HOLDS, else a name of the output."""
    where: str = ""
    """The line of the model that reads it."""


@dataclass(frozen=True)
class BatchChecks:
    """What every micro-batch has to satisfy; evaluated on the host."""

    graph: fx.GraphModule | None = None
    """From the tensors of a batch, in the order of `keys`, to one output for each check."""
    keys: tuple[str, ...] = ()
    checks: tuple[OutputCheck, ...] = ()
    expected: tuple[object, ...] = ()
    """What the outputs are for the first micro-batch, described."""
    computed: tuple[str, ...] = ()
    """Messages of the checks that stay in the code of the segments."""

    def verify(self, batch: Mapping[str, Tensor], name: Callable[[], str]) -> None:
        """Raise CaptureError where a check fails; `name` says what the batch consists of."""
        found = self.evaluate(batch, name)
        for check, expected, value in zip(self.checks, self.expected, found, strict=True):
            where = f" ({check.where})" if check.where else ""
            if check.kind is Requirement.HOLDS and value is False:
                raise CaptureError(f"{name()}: the model refuses it: {check.message}{where}")
            if check.kind is not Requirement.HOLDS and value != expected:
                raise CaptureError(
                    f"{name()}: {check.message}{where} is {_show(value)}, and the model was "
                    f"captured with {_show(expected)}, on which its code depends. {_ADVICE}"
                )

    def evaluate(self, batch: Mapping[str, Tensor], name: Callable[[], str]) -> list[object]:
        """Return what each check finds in a batch, as something that can be compared."""
        if self.graph is None:
            return []
        try:
            with torch.no_grad():
                found = self.graph(*(batch[key] for key in self.keys))
        except Exception as error:  # whatever the model's operations raise of unfit values
            raise CaptureError(
                f"{name()}: what the model asks of its batch cannot be computed: {error}"
            ) from error
        return [_described(c.kind, value) for c, value in zip(self.checks, found, strict=True)]


@dataclass(frozen=True)
class _Described:
    """A tensor, by its shape alone where only that matters; a NaN equals itself, being text."""

    shape: tuple[int, ...]
    elements: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.elements is None:
            return f"of shape {list(self.shape)}"
        return f"[{', '.join(self.elements)}]" if self.shape else self.elements[0]


def _described(kind: Requirement, value: object) -> object:
    if kind is Requirement.HOLDS:
        return bool(value.all()) if isinstance(value, Tensor) else bool(value)
    if isinstance(value, Tensor):
        elements = tuple(map(str, value.flatten().tolist())) if kind is Requirement.VALUE else None
        return _Described(tuple(value.shape), elements)
    if isinstance(value, tuple | list):
        return tuple(_described(kind, part) for part in value)
    return str(value)


def _show(found: object) -> str:
    parts = found if isinstance(found, tuple) else (found,)
    text = ", ".join(map(str, parts))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
