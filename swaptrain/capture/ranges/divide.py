"""A captured graph whose largest parameters are divided into ranges, beside the one it comes of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from swaptrain.capture.evaluation.graph import UncutEvaluation
from swaptrain.capture.evaluation.numbers import loss_node
from swaptrain.capture.gradient_layout import gradient_strides
from swaptrain.capture.losses.terms import LossTerms, loss_terms
from swaptrain.capture.ranges.divided_read import Call, DividedRead
from swaptrain.capture.ranges.lookups import is_embedding
from swaptrain.capture.ranges.reads import divisible_reads
from swaptrain.capture.segments import Binding
from swaptrain.capture.trace import Trace, resolve_attribute, trace_graph
from swaptrain.capture.uncut import Uncut
from swaptrain.program.model import ParameterSpec
from swaptrain.program.row_ranges import RowRange
from swaptrain.program.tensors import TensorSpec, contiguous

__all__ = ["Ranges", "divide", "divide_evaluation", "divisible_parameters", "whole_embeddings"]

Ranges = Mapping[str, Sequence[RowRange]]
"""By name of a parameter that is divided: its ranges, in order, which are all of it."""


def divisible_parameters(
    uncut: Uncut, evaluations: Sequence[UncutEvaluation] = ()
) -> Mapping[str, int]:
    """Return by the parameters that can be divided the least rows of a range.

    Stacks of experts that products of their rows alone read, and embeddings that lookups alone
    read, in training and where the model is evaluated, and whose gradients no hook asks for.
    """
    found = {n: [*reads] for n, reads in divisible_reads(uncut.trace, uncut.origins).items()}
    left_out = set(uncut.hooks)
    for each in evaluations:
        read = {binding.name for binding in each.origins.values() if binding.kind == "parameter"}
        evaluated = divisible_reads(each.trace, each.origins)
        left_out |= read - evaluated.keys()
        for name, reads in evaluated.items():
            found.setdefault(name, []).extend(reads)
    return {
        name: max(read.least for read in found[name])
        for name in uncut.parameters
        if name in found and name not in left_out
    }


def whole_embeddings(uncut: Uncut) -> Mapping[str, ParameterSpec]:
    """Return the embeddings that something else reads than what can be divided."""
    divisible = divisible_reads(uncut.trace, uncut.origins)
    names = {b.name for node, b in uncut.origins.items() if is_embedding(node)}
    parameters = uncut.parameters
    return {n: s for n, s in parameters.items() if n in names and n not in divisible}


def divide(uncut: Uncut, ranges: Ranges) -> Uncut:
    """Return the graph with a read for each range; `uncut` stays as it is.

    A range is a parameter by itself, with the name of an `RowRange`.
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
    """Return a graph in evaluation mode with a read for each range; `uncut` stays as it is."""
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
            found[each.name] = replace(spec, tensor=tensor, rows=each)
    return found


def _losses(
    losses: LossTerms, captured: fx.GraphModule, trace: Trace, keys: list[str], loss: fx.Node
) -> LossTerms:
    """Return the marks on the nodes of a copied graph: those that there were."""
    return losses if losses.counter is None else loss_terms(captured, trace, keys, loss)


@dataclass
class _DividedCopy:
    """A graph while it is copied node by node, a read for each range in place of the whole."""

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
        self._reads: dict[fx.Node, tuple[str, DividedRead]] = {}
        self._left: set[fx.Node] = set()
        self._asked: dict[fx.Node, dict[Call, None]] = {}
        """By node: what is asked of it for the ranges."""
        for name, reads in divisible_reads(self.trace, self.before).items():
            for read in reads if name in self.ranges else ():
                self._reads[read.node] = name, read
                self._left.update(read.left)
                asked = self._asked.setdefault(read.source, {})
                asked.update({read.place(each): None for each in self.ranges[name]})
        self._places: dict[tuple[Any, ...], fx.Node] = {}
        nodes = list(self.captured.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs:
            self._add(node)
        for node in inputs:
            self._ask(node)
        for node in nodes:
            if node.op != "placeholder":
                self._add(node)
                self._ask(node)

    def graph_module(self) -> fx.GraphModule:
        """Return the copy, with the attributes that it fetches."""
        found = fx.GraphModule(self._attributes, self._graph)
        found.meta.update(self.captured.meta)
        return found

    def _add(self, node: fx.Node) -> None:
        if node in self._left:
            return
        if node in self._reads:
            self.nodes[node] = self._read(*self._reads[node])
            return
        copy = self.nodes[node] = self._graph.node_copy(node, self.nodes.__getitem__)
        if node.op == "get_attr":
            target = str(node.target)
            self._attributes[target] = resolve_attribute(self.captured, target)
        if node in self.before:
            self.origins[copy] = self.before[node]

    def _ask(self, node: fx.Node) -> None:
        """Add what says where ranges lie, beside the copy of what it asks."""
        for place in self._asked.get(node, ()):
            target, *given = place
            self._places[node, *place] = self._graph.call_function(
                target, (self.nodes[node], *given)
            )

    def _read(self, name: str, read: DividedRead) -> fx.Node:
        """Add a chain of reads, each of which gets what those before it have made."""
        made: fx.Node | None = None
        for each in self.ranges[name]:
            weight = read.turn(self._graph, self._fetch(read.weight, each))
            place = self._places[read.source, *read.place(each)]
            target, first, *given = read.call(weight, place, made)
            made = self._graph.call_function(target, (self.nodes[first], *given))
            made.meta["val"] = read.node.meta.get("val")
        assert made is not None, "a parameter that is divided has a row"
        return made

    def _fetch(self, node: fx.Node, each: RowRange) -> fx.Node:
        """Add what fetches a range of a parameter, fake as the whole is."""
        target = f"{node.target}_{each.first}_{each.end}"
        while hasattr(self.captured, target):  # the model may have one of that name
            target += "_"
        if target not in self._attributes:
            whole = resolve_attribute(self.captured, str(node.target))
            with self.trace.fake_mode:
                shape = (each.count, *whole.shape[1:])
                own = torch.empty(shape, dtype=whole.dtype, device=whole.device)
                self._attributes[target] = nn.Parameter(own, requires_grad=whole.requires_grad)
        fetched = self._graph.get_attr(target)
        self.origins[fetched] = Binding("parameter", each.name)
        return fetched
