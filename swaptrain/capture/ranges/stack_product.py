"""A product of rows with a stack of experts, whichever way it says whose rows are whose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

__all__ = ["StackProduct"]


@dataclass(frozen=True)
class StackProduct:
    """A product of rows with the matrices of a parameter [E, K, N]."""

    node: fx.Node
    rows: fx.Node
    weight: fx.Node
    """What fetches the parameter."""
    turned: fx.Node | None
    """What transposes its matrices, where something does."""

    @property
    def left(self) -> tuple[fx.Node, ...]:
        """The nodes that its ranges need no more, beside `node`."""
        return (self.weight,) if self.turned is None else (self.weight, self.turned)

    def turn(self, graph: fx.Graph, weight: fx.Node) -> fx.Node:
        """Return a range of the parameter as the product reads it."""
        if self.turned is None:
            return weight
        return graph.call_function(torch.ops.aten.transpose.int, (weight, *self.turned.args[1:]))
