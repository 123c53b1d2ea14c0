"""Puts cross entropies by rows, and heads over ranges of tokens, into a segment's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from swaptrain.capture.head.cross_entropy import cross_entropy
from swaptrain.capture.head.trained_rows import Head, find_head
from swaptrain.capture.tokens.head import HeadLoss
from swaptrain.capture.trace import resolve_attribute

__all__ = ["entropy_in", "heads_of_losses", "replace_cross_entropy"]

_aten = torch.ops.aten
_NONE = 0
"""torch's number of the reduction that is none."""
_VIEWS = (_aten.view.default, _aten.reshape.default)


def replace_cross_entropy(
    graph: fx.Graph,
    owner: torch.nn.Module,
    *,
    skip_ignored: bool = False,
    tokens: int | None = None,
    heads: Collection[fx.Node] = (),
) -> None:
    """Let a segment's graph compute its cross entropies by rows, in place.

    `owner` holds the bodies of its higher-order operations. With `skip_ignored` a head is computed
    for the rows alone that are not ignored, where it has one reader. Those of the cross entropies
    `heads`, which nothing writes to, are computed over ranges of `tokens`.

    Those whose targets are class numbers and whose loss is the mean or the sum of rows that count
    alike. A cast of the logits that nothing else reads becomes part of it. A graph that writes to
    tensors stays as it is: logits are read later than they were, and again in the backward.
    """
    writes = any(_writes(node, owner) for node in graph.nodes)
    skip_ignored = skip_ignored and not writes
    for loss in [one for one in _losses(graph) if not writes or one.node in heads]:
        node, given = loss.node, loss.given
        targets, source = given["target"], loss.source
        by_ranges = node in heads
        head = loss.head() if skip_ignored or by_ranges else None
        count: int | None = loss.count
        with graph.inserting_before(node):
            if head is not None and skip_ignored:
                hidden, targets = head.rows(graph, targets, given["ignore_index"])
                count = None
            elif head is not None:
                hidden = head.hidden
            rest = (targets, given["reduction"], given["ignore_index"])
            if head is not None and by_ranges:
                assert tokens is not None
                body = HeadLoss(head.body(), tokens, classes=loss.classes, dtype=loss.dtype)
                by_rows = graph.call_function(body, (hidden, *rest, *head.whole))
            else:
                if head is not None and skip_ignored:
                    source = head.apply(graph, hidden)
                shape: dict[str, Any] = {"shape": (count, loss.classes), "dtype": loss.dtype}
                by_rows = graph.call_function(cross_entropy, (source, *rest), shape)
        by_rows.meta.update(node.meta)
        node.replace_all_uses_with(by_rows)
        for unused in (node, *loss.passed):
            graph.erase_node(unused)
        if head is not None and (skip_ignored or by_ranges):
            head.erase(graph)


def heads_of_losses(graph: fx.Graph, tokens: int) -> Iterator[tuple[fx.Node, ...]]:
    """Yield the operations of each head of more than `tokens` rows, from its linear to the loss."""
    for loss in _losses(graph):
        head = loss.head()
        if head is not None and loss.count > tokens:
            yield (*head.nodes, *loss.passed[::-1], loss.node)


def entropy_in(weighted: fx.Node) -> fx.Node:
    """Return the cross entropy that a node is, or weights."""
    node = weighted
    while node.target is not _aten.cross_entropy_loss.default:
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True)
class _ClassLoss:
    """A cross entropy that can be computed by rows."""

    node: fx.Node
    given: dict[str, Any]
    source: fx.Node
    """Logits before their cast."""
    passed: list[fx.Node]
    """The operations between `source` and `node`, the last one first."""
    count: int
    classes: int
    dtype: torch.dtype

    def head(self) -> Head | None:
        return find_head(self.source, self.passed[-1] if self.passed else self.node)


def _losses(graph: fx.Graph) -> Iterator[_ClassLoss]:
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not _aten.cross_entropy_loss.default:
            continue
        given = _arguments(node)
        if _is_usual(given):
            cast = _value(given["self"])
            source, passed = _before_cast(given["self"], node)
            count, classes = cast.shape
            yield _ClassLoss(node, given, source, passed, count, classes, cast.dtype)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operation by their names in its schema."""
    target: Any = node.target
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given.update(zip(given, node.args, strict=False))
    return given | node.kwargs


def _writes(node: fx.Node, owner: torch.nn.Module) -> bool:
    """Whether an operation, or one in the body of a region without gradients, says it writes."""
    if node.op == "get_attr":
        body = resolve_attribute(owner, str(node.target))
        return isinstance(body, fx.GraphModule) and any(_writes(n, body) for n in body.graph.nodes)
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _is_usual(given: dict[str, Any]) -> bool:
    if given["weight"] is not None or given["label_smoothing"] or given["reduction"] == _NONE:
        return False
    logits, targets = _value(given["self"]), _value(given["target"])
    return (
        isinstance(logits, Tensor)
        and isinstance(targets, Tensor)
        and logits.dim() == 2
        and logits.is_contiguous()
        and targets.dim() == 1
        and targets.dtype == torch.int64
        # With none of either torch has rules of its own.
        and logits.numel() > 0
    )


def _before_cast(logits: fx.Node, user: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return what is cast to become `logits`, and the nodes between, the last one first.

    Where nothing is cast, or something else reads the result too, that is `logits`, and none.
    """
    node, reader = logits, user
    passed: list[fx.Node] = []
    while node.op == "call_function" and set(node.users) == {reader}:
        passed.append(node)
        source = node.args[0]
        if node.target is _aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            assert isinstance(source, fx.Node)
            value = _value(source)
            if isinstance(value, Tensor) and value.is_floating_point() and value.is_contiguous():
                return source, passed
            break
        if node.target not in _VIEWS or not isinstance(source, fx.Node):
            break
        node, reader = source, node
    return logits, []


def _value(node: Any) -> Any:
    """Return the fake tensor that a node makes, as far as the export has left one."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None
