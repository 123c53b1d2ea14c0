"""A captured graph and its cuts become segments: code shared by isomorphic ones, and bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import fx

from swaptrain.capture.head.loss_by_rows import entropy_in, replace_cross_entropy
from swaptrain.capture.losses.rewriting import weigh
from swaptrain.capture.losses.terms import LossTerms
from swaptrain.capture.randomness import reseed
from swaptrain.capture.tokens.divided import DividedTokens
from swaptrain.capture.tokens.regions import Region
from swaptrain.capture.tokens.rewriting import replace_regions
from swaptrain.capture.trace import Trace, is_random, resolve_attribute

__all__ = ["Binding", "Code", "SegmentGraph", "slice_graph"]


@dataclass(frozen=True)
class Binding:
    """What one placeholder of a segment's code stands for."""

    kind: str
    """`parameter`, `buffer` (mutated), `constant`, or `value`."""
    name: str
    written: bool = False
    """A value that the segment's code writes to: it is handed a copy."""


@dataclass(frozen=True)
class Code:
    """The computation of one isomorphism class: callables from bindings to outputs."""

    train: fx.GraphModule


@dataclass(frozen=True)
class SegmentGraph:
    """One segment as cut out of the graph."""

    nodes: tuple[fx.Node, ...]
    bindings: tuple[Binding, ...]
    outputs: tuple[fx.Node, ...]
    random: tuple[str, ...]
    """Names of its operations that may draw, in order: the keys of their draws."""
    terms: tuple[int, ...]
    """Numbers of the counted terms of the loss that it computes, in order."""
    isomorphism: int


def slice_graph(
    captured: fx.GraphModule,
    trace: Trace,
    cuts: Sequence[int],
    origins: Mapping[fx.Node, Binding],
    loss: fx.Node,
    losses: LossTerms,
    *,
    skip_ignored: bool = False,
    divided: DividedTokens | None = None,
) -> tuple[list[SegmentGraph], list[Code]]:
    """Cut `captured` after the computing nodes numbered `cuts`.

    `origins` says what every placeholder and `get_attr` tensor stands for. `skip_ignored` leaves
    rows that a cross entropy ignores out of the head. What is `divided` is computed over ranges of
    tokens. Returns the segments in order and the code of every isomorphism class.
    """
    nodes = [node for node in captured.graph.nodes if node.op == "call_function"]
    edges = [0, *(cut + 1 for cut in cuts), len(nodes)]
    segments: list[SegmentGraph] = []
    codes: list[Code] = []
    classes: dict[str, int] = {}
    segment_of = {node: k for k in range(len(edges) - 1) for node in nodes[edges[k] : edges[k + 1]]}
    for k in range(len(edges) - 1):
        part = nodes[edges[k] : edges[k + 1]]
        outputs = [
            node
            for node in part
            if node is loss or any(segment_of.get(user, k) != k for user in node.users)
        ]
        graph, inputs, random, terms, copies = _extract(part, outputs, losses)
        written = frozenset().union(*(trace.facts[node].written for node in part))
        bindings = tuple(
            _binding(origins.get(node) or Binding("value", node.name), node, trace, written)
            for node in inputs
        )
        own = [] if divided is None else [r for r in divided.regions if segment_of.get(r.out) == k]
        key = _canonical(captured, trace, graph, inputs, bindings)
        key += "".join(f" {copies[region.out]}" for region in own)
        if key not in classes:
            classes[key] = len(codes)
            if divided is not None:
                _divide(graph, copies, divided, own, captured, skip_ignored=skip_ignored)
            else:
                replace_cross_entropy(graph, captured, skip_ignored=skip_ignored)
            codes.append(Code(fx.GraphModule(captured, graph)))
        segments.append(
            SegmentGraph(tuple(part), bindings, tuple(outputs), random, terms, classes[key])
        )
    return segments, codes


def _divide(
    graph: fx.Graph,
    copies: Mapping[fx.Node, fx.Node],
    divided: DividedTokens,
    own: Sequence[Region],
    owner: fx.GraphModule,
    *,
    skip_ignored: bool,
) -> None:
    """Let a segment compute what is divided over ranges of tokens, and other losses by rows."""
    replace_regions(graph, own, copies, divided.tokens)
    heads = [entropy_in(copies[head[-1]]) for head in divided.heads if head[-1] in copies]
    replace_cross_entropy(
        graph, owner, skip_ignored=skip_ignored, tokens=divided.tokens, heads=heads
    )


def _binding(origin: Binding, node: fx.Node, trace: Trace, written: frozenset[int]) -> Binding:
    """Mark a value whose storage the segment writes."""
    touched = any(int(t.untyped_storage()._cdata) in written for t in trace.facts[node].tensors)
    return replace(origin, written=True) if origin.kind == "value" and touched else origin


def _extract(
    part: Sequence[fx.Node], outputs: Sequence[fx.Node], losses: LossTerms
) -> tuple[fx.Graph, list[fx.Node], tuple[str, ...], tuple[int, ...], Mapping[fx.Node, fx.Node]]:
    """Copy nodes into a graph of their own, whose placeholders are what they read from outside.

    The copies, by node, come last.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    inside = set(part)
    for node in part:
        for argument in node.all_input_nodes:
            if argument in inside or argument in copies or _is_submodule(argument):
                continue
            inputs.append(argument)
            copies[argument] = graph.placeholder(f"input_{len(inputs) - 1}")
            copies[argument].meta["val"] = argument.meta.get("val")
    random: list[str] = []
    terms: list[int] = []
    for node in part:
        for argument in node.all_input_nodes:
            if _is_submodule(argument) and argument not in copies:
                copies[argument] = graph.get_attr(str(argument.target))
        if is_random(node):
            graph.call_function(reseed, (len(random),))
            random.append(node.name)
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node] = weigh(node, copies, losses, terms)
    graph.output(tuple(copies[node] for node in outputs))
    return graph, inputs, tuple(random), tuple(terms), copies


def _is_submodule(node: fx.Node) -> bool:
    """Whether a `get_attr` node fetches the body of a higher-order operation."""
    return node.op == "get_attr" and isinstance(_body(node), fx.GraphModule)


def _body(node: fx.Node) -> Any:
    owner = node.graph.owning_module
    assert owner is not None
    return resolve_attribute(owner, str(node.target))


def _canonical(
    captured: fx.GraphModule,
    trace: Trace,
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    bindings: Sequence[Binding],
) -> str:
    """Digest a segment's computation up to the names of its tensors."""
    lines = [
        f"{binding.kind} {binding.written} {[_layout(t) for t in trace.facts[node].tensors]}"
        for node, binding in zip(inputs, bindings, strict=True)
    ]
    numbers = {node: _Number(i) for i, node in enumerate(graph.nodes)}
    number: Any = numbers.__getitem__  # fx's type for map_arg is narrower than what it does
    for node in graph.nodes:
        if node.op == "get_attr":
            body = resolve_attribute(captured, str(node.target))
            lines.append(f"body {body.code}")
        else:
            args = fx.node.map_arg((node.args, node.kwargs), number)
            lines.append(f"{node.op} {node.target if node.op != 'placeholder' else ''} {args}")
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.requires_grad}"


class _Number:
    """Stands for a node by its position inside an argument tree."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
