"""Finds the products with stacks of experts in a graph, and the parameters that only they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from swaptrain.capture.experts.operations import RANGE
from swaptrain.capture.segments import Binding
from swaptrain.capture.trace import Trace

__all__ = ["Product", "expert_products", "has_products"]

_aten = torch.ops.aten
_FALLBACK = "transformers.grouped_mm_fallback.default"


@dataclass(frozen=True)
class Product:
    """A product of rows in the order of their experts with the stack of these."""

    node: fx.Node
    rows: fx.Node
    weight: fx.Node
    """What fetches the parameter."""
    turned: fx.Node | None
    """What transposes its matrices, where something does."""
    offsets: fx.Node
    """Where the rows of each expert end, [E]."""
    grouped: bool
    """torch's own product; else the loop of transformers."""


def expert_products(
    trace: Trace, origins: Mapping[fx.Node, Binding]
) -> Mapping[str, tuple[Product, ...]]:
    """Return the products with each parameter that stacks experts and that nothing else reads.

    By the parameter's name. Its matrices lie one behind the other, each without holes.
    """
    found: dict[str, list[Product]] = {}
    others: set[str] = set()
    for node, binding in origins.items():
        if binding.kind != "parameter":
            continue
        products = found.setdefault(binding.name, [])
        for user in node.users:
            product = _product(node, user, trace)
            if product is None:
                others.add(binding.name)
            else:
                products += product
    return {name: tuple(each) for name, each in found.items() if each and name not in others}


def has_products(codes: Iterable[fx.GraphModule]) -> bool:
    """Whether one of the segments' codes multiplies rows by the experts that a router chose."""
    targets = (node.target for code in codes for node in code.graph.nodes)
    return any(target is RANGE or _is_grouped(target) for target in targets)


def _product(weight: fx.Node, user: fx.Node, trace: Trace) -> list[Product] | None:
    """Return the products that a reader of a parameter is, or hands it to; None: it is another."""
    (stack,) = trace.facts[weight].tensors
    if stack.dim() != 3 or not stack.is_contiguous():
        return None
    if user.target is _aten.transpose.int:
        if sorted(dim % 3 for dim in user.args[1:]) != [1, 2]:  # type: ignore[operator]
            return None
        each = [_of(reader, weight, user, trace) for reader in user.users]
    else:
        each = [_of(user, weight, None, trace)]
    return None if None in each else [product for product in each if product is not None]


def _of(node: fx.Node, weight: fx.Node, turned: fx.Node | None, trace: Trace) -> Product | None:
    if not _is_grouped(node.target):
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
    return Product(node, rows, weight, turned, offsets, grouped)


def _is_grouped(target: object) -> bool:
    return target is _aten._grouped_mm.default or str(target) == _FALLBACK


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a product by what they are, whatever they are called."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    kinds = dict(zip(names, ("rows", "weight", "offsets"), strict=False))
    return {kinds.get(name, name): value for name, value in given.items()}
