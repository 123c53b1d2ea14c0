"""Checks on a micro-batch that are made before its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from swaptrain.errors import CaptureError

__all__ = ["BatchChecks", "Check", "described"]

Found = bool | int | float | complex | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Check:
    """One output of the checks' graph, and what it has to be."""

    message: str
    expected: Found | None = None
    """A number, or the shapes of tensors; None: all elements have to be true."""
    where: str = ""
    """The line of the model that asks."""


@dataclass(frozen=True)
class BatchChecks:
    """What every micro-batch has to satisfy; evaluated on the host."""

    graph: fx.GraphModule | None = None
    """From the tensors of a batch, in the order of `keys`, to one output for each check."""
    keys: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    computed: tuple[str, ...] = field(default=())
    """Messages of the checks that stay in the code of the segments."""

    def verify(self, batch: Mapping[str, Tensor], name: Callable[[], str]) -> None:
        """Raise CaptureError where a check fails; `name` says what the batch consists of."""
        if self.graph is None:
            return
        try:
            with torch.no_grad():
                found = self.graph(*(batch[key] for key in self.keys))
        except Exception as error:  # whatever the model's operations raise of unfit values
            raise CaptureError(
                f"{name()}: the model's checks of its batch cannot be computed: {error}"
            ) from error
        for check, value in zip(self.checks, found, strict=True):
            _verify(check, value, name)


def _verify(check: Check, value: object, name: Callable[[], str]) -> None:
    where = f" ({check.where})" if check.where else ""
    if check.expected is None:
        holds = bool(value.all()) if isinstance(value, Tensor) else bool(value)
        if not holds:
            raise CaptureError(f"{name()} fails a check of the model: {check.message}{where}")
        return
    found = described(value)
    if found != check.expected and not (found != found and check.expected != check.expected):
        raise CaptureError(
            f"{name()} gives {_show(found)} for {check.message}{where}; the model was captured "
            f"with {_show(check.expected)}, which its code depends on. All micro-batches have to "
            "agree in this: order, pad or crop the items so that they do, or leave these out"
        )


def described(value: object) -> Found:
    """Return a number as it is, and of tensors their shapes."""
    if isinstance(value, bool | int | float | complex):
        return value
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(tuple(item.shape) for item in values if isinstance(item, Tensor))


def _show(found: Found) -> str:
    if not isinstance(found, tuple):
        return str(found)
    return "shape " + " and ".join(str(list(shape)) for shape in found)
