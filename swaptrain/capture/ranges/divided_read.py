"""What reads a parameter, and can read one range of its rows after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from swaptrain.program.row_ranges import RowRange

__all__ = ["Call", "DividedRead", "StackProduct"]

Call = tuple[Any, ...]
"""An operation, and then its arguments."""


@dataclass(frozen=True)
class DividedRead(ABC):
    """A node that reads a parameter, which its ranges replace."""

    node: fx.Node
    weight: fx.Node
    """What fetches the parameter."""

    @property
    def least(self) -> int:
        """The least rows of a range."""
        return 1

    @property
    def left(self) -> tuple[fx.Node, ...]:
        """The nodes that the ranges need no more, beside `node`."""
        return (self.weight,)

    @property
    @abstractmethod
    def source(self) -> fx.Node:
        """What is asked where a range lies.

        It is asked where it is made, before any cut: so that ranges differ by nothing that their
        code knows, and share it.
        """

    @abstractmethod
    def place(self, own: RowRange) -> Call:
        """Return what says where a range lies: an operation, and its arguments after `source`."""

    def turn(self, graph: fx.Graph, weight: fx.Node) -> fx.Node:
        """Return a range of the parameter as it is read."""
        return weight

    @abstractmethod
    def call(self, weight: fx.Node, place: fx.Node, made: fx.Node | None) -> Call:
        """Return the read of one range; `made` is what those before it have made.

        Its first argument is a node of the graph that is divided.
        """


@dataclass(frozen=True)
class StackProduct(DividedRead):
    """A product of rows with the matrices of a parameter [E, K, N]."""

    rows: fx.Node
    turned: fx.Node | None
    """What transposes its matrices, where something does."""

    @property
    def left(self) -> tuple[fx.Node, ...]:
        return (self.weight,) if self.turned is None else (self.weight, self.turned)

    def turn(self, graph: fx.Graph, weight: fx.Node) -> fx.Node:
        if self.turned is None:
            return weight
        return graph.call_function(torch.ops.aten.transpose.int, (weight, *self.turned.args[1:]))
