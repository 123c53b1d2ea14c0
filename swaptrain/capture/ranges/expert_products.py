"""Finds the products with stacks of experts that a graph computes, and divides them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from swaptrain.capture.ranges.batch_products import BatchProduct, batch_product
from swaptrain.capture.ranges.divided_read import Call, StackProduct
from swaptrain.capture.ranges.expert_operations import BOUNDS, RANGE
from swaptrain.capture.trace import Trace
from swaptrain.program.row_ranges import RowRange

__all__ = ["RoutedProduct", "has_products", "is_grouped", "products_of"]

_aten = torch.ops.aten
_FALLBACK = "transformers.grouped_mm_fallback.default"


@dataclass(frozen=True)
class RoutedProduct(StackProduct):
    """A product of rows in the order of their experts with the stack of these."""

    offsets: fx.Node
    """Where the rows of each expert end, [E]."""
    grouped: bool
    """torch's own product; else the loop of transformers."""

    @property
    def source(self) -> fx.Node:
        return self.offsets

    def place(self, own: RowRange) -> Call:
        return BOUNDS, own.first, own.end

    def call(self, weight: fx.Node, place: fx.Node, made: fx.Node | None) -> Call:
        return RANGE, self.rows, weight, place, made, self.grouped


def has_products(codes: Iterable[fx.GraphModule]) -> bool:
    """Whether one of the segments' codes multiplies rows by the experts that a router chose."""
    targets = (node.target for code in codes for node in code.graph.nodes)
    return any(target is RANGE or is_grouped(target) for target in targets)


def products_of(
    weight: fx.Node, user: fx.Node, trace: Trace
) -> list[RoutedProduct | BatchProduct] | None:
    """Return the products that a reader of a parameter is, or hands it to; None: it is another."""
    (stack,) = trace.facts[weight].tensors
    if stack.dim() != 3 or not stack.is_contiguous():
        return None
    turned: fx.Node | None = None
    readers = [user]
    if user.target is _aten.transpose.int:
        if sorted(dim % 3 for dim in user.args[1:]) != [1, 2]:  # type: ignore[operator]
            return None
        turned, readers = user, list(user.users)
    found: list[RoutedProduct | BatchProduct] = []
    for reader in readers:
        product = _routed(reader, weight, turned, trace) or batch_product(
            reader, weight, turned, trace
        )
        if product is None:
            return None
        found.append(product)
    return found


def _routed(
    node: fx.Node, weight: fx.Node, turned: fx.Node | None, trace: Trace
) -> RoutedProduct | None:
    if not is_grouped(node.target):
        return None
    grouped = node.target is _aten._grouped_mm.default
    given = _arguments(node)
    rows, matrices, offsets = (given.get(name) for name in ("rows", "weight", "offsets"))
    (out,) = trace.facts[node].tensors
    if (
        not isinstance(rows, fx.Node)
        or not isinstance(offsets, fx.Node)
        or matrices is not (turned or weight)
        or rows in (weight, turned)
        or given.get("bias") is not None
        or given.get("out_dtype") is not None
    ):
        return None
    experts = trace.facts[weight].tensors[0].shape[0]
    of_rows, of_offsets = (trace.facts[n].tensors[0] for n in (rows, offsets))
    if of_rows.dim() != 2 or of_offsets.shape != (experts,) or not out.is_contiguous():
        return None
    return RoutedProduct(node, weight, rows, turned, offsets, grouped)


def is_grouped(target: object) -> bool:
    """Whether an operation multiplies rows in the order of their experts: torch's, or the loop."""
    return target is _aten._grouped_mm.default or str(target) == _FALLBACK


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a product by what they are, whatever they are called."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    kinds = dict(zip(names, ("rows", "weight", "offsets"), strict=False))
    return {kinds.get(name, name): value for name, value in given.items()}
