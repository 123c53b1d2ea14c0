"""Finds the lookups in an embedding that a graph makes, and divides them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from swaptrain.capture.ranges.lookup_operations import FIRST, LOOKUP
from swaptrain.capture.trace import Trace
from swaptrain.program.row_ranges import RowRange

__all__ = ["Lookup", "lookups_of"]

_aten = torch.ops.aten
_NO_PADDING = -1


@dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a parameter by their indices."""

    node: fx.Node
    indices: fx.Node
    weight: fx.Node
    """What fetches the parameter."""
    padding: int
    """The row that gets no gradient; -1: there is none."""
    rows: int
    """Of the parameter."""

    least = 1

    @property
    def left(self) -> tuple[fx.Node, ...]:
        """The nodes that its ranges need no more, beside `node`."""
        return (self.weight,)

    @property
    def source(self) -> fx.Node:
        """What is asked where ranges begin."""
        return self.indices

    def place(self, own: RowRange) -> tuple[object, ...]:
        """Return what says where a range lies, an operation on `source`, and its arguments."""
        return FIRST, own.first, self.rows

    def add_range(
        self,
        graph: fx.Graph,
        nodes: Mapping[fx.Node, fx.Node],
        weight: fx.Node,
        place: fx.Node,
        made: fx.Node | None,
    ) -> fx.Node:
        """Add the lookup in one range; `made` is what those before it have found."""
        given = (nodes[self.indices], weight, place, made, self.padding)
        return graph.call_function(LOOKUP, given)


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
    return [Lookup(user, indices, weight, padding, table.shape[0])]
