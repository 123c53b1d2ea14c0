"""Finds the lookups in an embedding that a graph makes, and divides them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from swaptrain.capture.ranges.divided_read import Call, DividedRead
from swaptrain.capture.ranges.lookup_operations import FIRST, LOOKUP
from swaptrain.capture.trace import Trace
from swaptrain.program.row_ranges import RowRange

__all__ = ["Lookup", "is_embedding", "lookups_of"]

_aten = torch.ops.aten
_NO_PADDING = -1


@dataclass(frozen=True)
class Lookup(DividedRead):
    """A lookup of rows of a parameter by their indices."""

    indices: fx.Node
    padding: int
    """The row that gets no gradient; -1: there is none."""
    rows: int
    """Of the parameter."""

    @property
    def source(self) -> fx.Node:
        return self.indices

    def place(self, own: RowRange) -> Call:
        return FIRST, own.first, self.rows

    def call(self, weight: fx.Node, place: fx.Node, made: fx.Node | None) -> Call:
        return LOOKUP, self.indices, weight, place, made, self.padding


def is_embedding(weight: fx.Node) -> bool:
    """Whether a lookup reads a parameter, whatever else does."""
    return any(user.target is _aten.embedding.default for user in weight.users)


def lookups_of(weight: fx.Node, user: fx.Node, trace: Trace) -> list[Lookup] | None:
    """Return the lookup that a reader of a parameter is, alone; None: it is none to divide."""
    (table,) = trace.facts[weight].tensors
    if user.target is not _aten.embedding.default or user.args[0] is not weight or user.kwargs:
        return None
    indices, *others = user.args[1:]
    padding, *flags = others or [_NO_PADDING]
    if (
        not isinstance(indices, fx.Node)
        or not isinstance(padding, int)
        or any(flags)  # scaled by how often a row is read, or sparse
        or table.dim() != 2
        or not table.is_contiguous()
    ):
        return None
    return [Lookup(user, weight, indices, padding, table.shape[0])]
