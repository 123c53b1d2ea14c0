"""A captured graph whose stacks of experts are divided into ranges, beside the one it comes of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from swaptrain.capture.evaluation.graph import UncutEvaluation
from swaptrain.capture.evaluation.numbers import loss_node
from swaptrain.capture.experts.operations import BOUNDS, RANGE
from swaptrain.capture.experts.products import Product, expert_products
from swaptrain.capture.gradient_layout import gradient_strides
from swaptrain.capture.losses.terms import LossTerms, loss_terms
from swaptrain.capture.segments import Binding
from swaptrain.capture.trace import Trace, resolve_attribute, trace_graph
from swaptrain.capture.uncut import Uncut
from swaptrain.program.expert_ranges import ExpertRange
from swaptrain.program.model import ParameterSpec
from swaptrain.program.tensors import TensorSpec, contiguous

__all__ = ["Ranges", "divide", "divide_evaluation", "stacks_of_experts"]

Ranges = Mapping[str, Sequence[ExpertRange]]
"""By name of a parameter that stacks experts: its ranges, in order, which are all of it."""


def stacks_of_experts(
    uncut: Uncut, evaluations: Sequence[UncutEvaluation] = ()
) -> Mapping[str, ParameterSpec]:
    """Return the parameters that can be divided, by name.

    These are stacks of experts that grouped products alone read, in training and where the model
    is evaluated, and whose gradients no hook asks for.
    """
    found = expert_products(uncut.trace, uncut.origins).keys() - uncut.hooks.keys()
    for each in evaluations:
        read = {binding.name for binding in each.origins.values() if binding.kind == "parameter"}
        found -= read - expert_products(each.trace, each.origins).keys()
    return {name: spec for name, spec in uncut.parameters.items() if name in found}


def divide(uncut: Uncut, ranges: Ranges) -> Uncut:
    """Return the graph with a product for each range; `uncut` stays as it is.

    A range is a parameter by itself, with the name of an `ExpertRange`.
    """
    copy = _DividedCopy(uncut.captured, uncut.trace, uncut.origins, ranges)
    keys = list(uncut.batch)
    captured = copy.graph_module()
    trace = trace_graph(captured, uncut.trace.fake_mode, uncut.batch)
    output = next(node for node in captured.graph.nodes if node.op == "output")
    return replace(
        uncut,
        captured=captured,
        trace=trace,
        parameters=_divided(uncut.parameters, ranges),
        origins=copy.origins,
        gradient_strides=gradient_strides(trace),
        losses=_losses(uncut.losses, captured, trace, keys, output.all_input_nodes[0]),
    )


def divide_evaluation(uncut: UncutEvaluation, ranges: Ranges) -> UncutEvaluation:
    """Return a graph in evaluation mode with a product for each range; `uncut` stays as it is."""
    copy = _DividedCopy(uncut.captured, uncut.trace, uncut.origins, ranges)
    captured = copy.graph_module()
    trace = trace_graph(captured, uncut.trace.fake_mode, uncut.batch, gradients=False)
    flagged = [each.name for name in uncut.flagged & ranges.keys() for each in ranges[name]]
    return replace(
        uncut,
        captured=captured,
        trace=trace,
        origins=copy.origins,
        given=copy.nodes[uncut.given],
        losses=_losses(uncut.losses, captured, trace, list(uncut.batch), loss_node(captured)),
        flagged=uncut.flagged.union(flagged),
    )


def _divided(
    parameters: Mapping[str, ParameterSpec], ranges: Ranges
) -> Mapping[str, ParameterSpec]:
    found: dict[str, ParameterSpec] = {}
    for name, spec in parameters.items():
        if name not in ranges:
            found[name] = spec
        for each in ranges.get(name, ()):
            shape = (each.count, *spec.tensor.shape[1:])
            tensor = TensorSpec(each.name, shape, contiguous(shape), spec.tensor.dtype)
            found[each.name] = replace(spec, tensor=tensor, experts=each)
    return found


def _losses(
    losses: LossTerms, captured: fx.GraphModule, trace: Trace, keys: list[str], loss: fx.Node
) -> LossTerms:
    """Return the marks on the nodes of a copied graph: those that there were."""
    return losses if losses.counter is None else loss_terms(captured, trace, keys, loss)


@dataclass
class _DividedCopy:
    """A graph while it is copied node by node, a product for each range in place of the whole."""

    captured: fx.GraphModule
    trace: Trace
    before: Mapping[fx.Node, Binding]
    ranges: Ranges
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """By node of the graph that is copied: its copy."""
    origins: dict[fx.Node, Binding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._graph = fx.Graph()
        self._attributes: dict[str, Any] = {}
        self._products: dict[fx.Node, tuple[str, Product]] = {}
        self._left: set[fx.Node] = set()
        for name, products in expert_products(self.trace, self.before).items():
            for product in products if name in self.ranges else ():
                self._products[product.node] = name, product
                self._left.add(product.weight)
                if product.turned is not None:
                    self._left.add(product.turned)
        self._by_offsets: dict[fx.Node, dict[tuple[int, int], None]] = {}
        for name, product in self._products.values():
            own = self._by_offsets.setdefault(product.offsets, {})
            own.update({(each.first, each.end): None for each in self.ranges[name]})
        self._edges: dict[tuple[fx.Node, int, int], fx.Node] = {}
        for node in self.captured.graph.nodes:
            self._add(node)

    def graph_module(self) -> fx.GraphModule:
        """Return the copy, with the attributes that it fetches."""
        found = fx.GraphModule(self._attributes, self._graph)
        found.meta.update(self.captured.meta)
        return found

    def _add(self, node: fx.Node) -> None:
        if node in self._left:
            return
        if node in self._products:
            self.nodes[node] = self._product(*self._products[node])
            return
        copy = self.nodes[node] = self._graph.node_copy(node, self.nodes.__getitem__)
        if node.op == "get_attr":
            target = str(node.target)
            self._attributes[target] = resolve_attribute(self.captured, target)
        if node in self.before:
            self.origins[copy] = self.before[node]
        # Bounds are made here, where the rows are sorted: so that ranges differ by nothing that
        # their code knows, and share it.
        for first, end in self._by_offsets.get(node, ()):
            bounds = self._graph.call_function(BOUNDS, (copy, first, end))
            self._edges[node, first, end] = bounds

    def _product(self, name: str, product: Product) -> fx.Node:
        """Add a chain of products, each of which gets what those before it have made."""
        made: fx.Node | None = None
        for each in self.ranges[name]:
            weight = self._fetch(product.weight, each)
            if product.turned is not None:
                weight = self._graph.call_function(
                    torch.ops.aten.transpose.int, (weight, *product.turned.args[1:])
                )
            bounds = self._edges[product.offsets, each.first, each.end]
            rows = self.nodes[product.rows]
            made = self._graph.call_function(RANGE, (rows, weight, bounds, made, product.grouped))
            made.meta["val"] = product.node.meta.get("val")
        assert made is not None, "a stack has an expert"
        return made

    def _fetch(self, node: fx.Node, each: ExpertRange) -> fx.Node:
        """Add what fetches a range of a parameter, fake as the whole is."""
        target = f"{node.target}_{each.first}_{each.end}"
        if target not in self._attributes:
            whole = resolve_attribute(self.captured, str(node.target))
            with self.trace.fake_mode:
                shape = (each.count, *whole.shape[1:])
                own = torch.empty(shape, dtype=whole.dtype, device=whole.device)
                self._attributes[target] = nn.Parameter(own, requires_grad=whole.requires_grad)
        fetched = self._graph.get_attr(target)
        self.origins[fetched] = Binding("parameter", each.name)
        return fetched
