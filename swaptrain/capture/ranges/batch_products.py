"""Finds the products that send all rows through all experts (`bmm`), and divides them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from swaptrain.capture.ranges.batch_operations import BATCH_RANGE, FIRST_EXPERT, least_experts
from swaptrain.capture.ranges.divided_read import Call, StackProduct
from swaptrain.capture.trace import Trace
from swaptrain.program.row_ranges import RowRange

__all__ = ["BatchProduct", "batch_product"]


@dataclass(frozen=True)
class BatchProduct(StackProduct):
    """A product of rows [E, T, K], T for each expert, with the stack of these."""

    fewest: int
    """Experts that a range has."""

    @property
    def least(self) -> int:
        return self.fewest

    @property
    def source(self) -> fx.Node:
        return self.rows

    def place(self, own: RowRange) -> Call:
        return FIRST_EXPERT, own.first

    def call(self, weight: fx.Node, place: fx.Node, made: fx.Node | None) -> Call:
        return BATCH_RANGE, self.rows, weight, place, made


def batch_product(
    node: fx.Node, weight: fx.Node, turned: fx.Node | None, trace: Trace
) -> BatchProduct | None:
    """Return the product that a reader of a stack is; None: it is another."""
    if node.target is not torch.ops.aten.bmm.default or node.kwargs:
        return None
    rows, matrices = node.args
    (out,) = trace.facts[node].tensors
    if (
        not isinstance(rows, fx.Node)
        or matrices is not (turned or weight)
        or rows in (weight, turned)
        or not out.is_contiguous()
    ):
        return None
    experts, each, width = trace.facts[rows].tensors[0].shape
    fewest = least_experts(experts, each * width * out.shape[2])
    return BatchProduct(node, weight, rows, turned, fewest)
