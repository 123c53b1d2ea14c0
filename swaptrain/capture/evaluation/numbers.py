"""The numbers beside the loss of a graph in evaluation mode: those of the forward, and accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from swaptrain.capture.losses.operations import (
    JOINED,
    MEAN,
    SUM,
    ancestors,
    arguments,
    picks_classes,
)
from swaptrain.capture.trace import Trace, has_effect, is_random
from swaptrain.errors import CaptureError

__all__ = ["Numbers", "add_numbers", "loss_node"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default)
_CASTS = (_aten.to.dtype, _aten._to_copy.default)


@dataclass(frozen=True)
class Numbers:
    """What the vector of a graph in evaluation mode holds after the loss, in this order."""

    scalars: tuple[str, ...] = ()
    """What the forward returns beside its loss."""
    has_accuracy: bool = False
    """Whether two counts come last: the labels that were ranked first, and all that counted."""
    remark: str = ""
    """Why the forward's own numbers are not taken, where they are not."""


def loss_node(captured: fx.GraphModule) -> fx.Node:
    """Return the node of the loss: the first element of what the graph gives."""
    return _elements(captured)[0]


def add_numbers(captured: fx.GraphModule, trace: Trace, names: Sequence[str]) -> Numbers:
    """Complete what the graph gives beside its loss: `names` are those of the forward's numbers.

    Accuracy is added where the loss has one cross entropy of class numbers, a mean or a sum, and
    the forward returns no `accuracy` itself. What the forward returns is computed apart from the
    terms of the loss: these are weighted by tokens, and it is not.
    """
    loss, *others = _elements(captured)
    shared = ancestors([loss])
    counts = () if "accuracy" in names else _accuracy(captured, [n for n in shared if n.users])
    apart = _apart(captured, trace, others, shared)
    _pack(captured).args = ([loss, *apart, *counts],)
    captured.graph.eliminate_dead_code(has_effect)
    captured.recompile()
    return Numbers(tuple(names), has_accuracy=bool(counts))


def _pack(captured: fx.GraphModule) -> fx.Node:
    output = next(node for node in captured.graph.nodes if node.op == "output")
    pack: fx.Node
    (pack,) = output.all_input_nodes
    if pack.op != "call_function":
        raise CaptureError("it depends neither on the batch nor on a parameter there")
    return pack


def _elements(captured: fx.GraphModule) -> list[fx.Node]:
    elements = _pack(captured).args[0]
    assert isinstance(elements, list | tuple)
    return [node for node in elements if isinstance(node, fx.Node)]


def _accuracy(captured: fx.GraphModule, nodes: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Add the counts of one cross entropy, in float64; nothing where there is not just one."""
    entropies = [node for node in nodes if picks_classes(node)]
    if len(entropies) != 1 or arguments(entropies[0])["reduction"] not in (MEAN, SUM):
        return ()
    given = arguments(entropies[0])
    logits, target = given["self"], given["target"]
    source, dim = _source(logits)
    with captured.graph.inserting_before(_pack(captured)):

        def call(operation: Callable[..., Any], *args: Any) -> fx.Node:
            return captured.graph.call_function(operation, args)

        first = call(_aten.argmax.default, source, dim)
        first = call(_aten.reshape.default, first, list(target.meta["val"].shape))
        counted = call(_aten.ne.Scalar, target, given["ignore_index"])
        right = call(_aten.logical_and.default, call(_aten.eq.Tensor, first, target), counted)
        totals = (call(_aten.sum.default, found) for found in (right, counted))
        return tuple(call(_aten.to.dtype, total, torch.float64) for total in totals)


def _source(logits: fx.Node) -> tuple[fx.Node, int]:
    """Return the logits as they were before casts and views, and their dimension of classes.

    A cross entropy that alone reads its cast makes it by rows, and never has it whole.
    """
    value = logits.meta["val"]
    node, classes = logits, value.shape[-1]
    if value.dim() > 2:
        return logits, 1
    while node.target in (*_VIEWS, *_CASTS):
        before = node.args[0]
        assert isinstance(before, fx.Node)
        found, made = before.meta.get("val"), node.meta["val"]
        if not isinstance(found, torch.Tensor) or found.dim() == 0 or found.shape[-1] != classes:
            break
        if torch.promote_types(found.dtype, made.dtype) != made.dtype:
            break  # a cast that rounds may make two logits equal
        node = before
    return node, -1


def _apart(
    captured: fx.GraphModule, trace: Trace, others: list[fx.Node], shared: set[fx.Node]
) -> list[fx.Node]:
    """Return the nodes of the forward's numbers, with their own copies of the loss's parts."""
    above = ancestors(others)
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(captured.graph.nodes):
        again = node in shared and _is_part(node, trace)
        if node in above and (again or any(n in copies for n in node.all_input_nodes)):
            with captured.graph.inserting_after(node):
                copies[node] = captured.graph.node_copy(node, lambda n: copies.get(n, n))
    return [copies.get(node, node) for node in others]


def _is_part(node: fx.Node, trace: Trace) -> bool:
    """Whether a node may be a term of the loss, or a sum of terms."""
    facts = trace.facts.get(node)
    if node.op != "call_function" or facts is None or facts.written or is_random(node):
        return False
    size = sum(math.prod(tensor.shape) for tensor in facts.tensors)
    return size == 1 or node.target in JOINED or picks_classes(node)
