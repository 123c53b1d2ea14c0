"""An output head over the rows alone whose label counts, where `train.skip_ignored` asks for it.

The rows of a chat's questions are labelled -100: the head of a language model computes logits of a
whole vocabulary for each of them, and the loss reads none. Here their hidden states are taken out
before the head. Each row's logits are what they were, and a gradient of 0 is not computed. What
changes is the order of sums: a kernel may add otherwise for another number of rows, and the
gradient of the head's weight is a sum over fewer rows. The bits are those of plain PyTorch whose
forward takes the rows out itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["Head", "all_rows", "find_head", "skips_ignored", "trained_rows"]

_aten = torch.ops.aten
_VIEWS = (
    *(_aten.view.default, _aten.reshape.default),
    *(_aten.contiguous.default, _aten.alias.default),
)
_WITH_NUMBERS = (_aten.mul.Tensor, _aten.div.Tensor, _aten.tanh.default)
"""What models do to logits by itself, with numbers at the most: scales, soft caps."""
_all = False


class Head:
    """The operations between hidden states and logits, first to last, of N rows."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes

    def erase(self, graph: fx.Graph) -> None:
        """Remove the operations, which nothing reads any more."""
        for node in self.nodes[::-1]:
            graph.erase_node(node)

    @property
    def hidden(self) -> fx.Node:
        """The hidden states, (..., H)."""
        source = self.nodes[0].args[0]
        assert isinstance(source, fx.Node)
        return source

    @property
    def whole(self) -> tuple[fx.Node, ...]:
        """The weight, and the bias where there is one."""
        return tuple(n for n in self.nodes[0].all_input_nodes if n is not self.hidden)

    def rows(self, graph: fx.Graph, targets: fx.Node, ignored: int) -> tuple[fx.Node, fx.Node]:
        """Add to `graph`, where it inserts, what takes out the rows that count; remove nothing.

        Returns their hidden states, (n, H), and their targets, (n,).
        """
        rows = graph.call_function(trained_rows, (targets, ignored))
        hidden = graph.call_function(_rows_of, (self.hidden, rows))
        return hidden, graph.call_function(torch.index_select, (targets, 0, rows))

    def apply(self, graph: fx.Graph, hidden: fx.Node) -> fx.Node:
        """Add the head of other hidden states, (n, H), to `graph`; returns the logits, (n, C)."""
        return self._copied(graph, {self.hidden: hidden})

    def body(self) -> fx.Graph:
        """Return the head alone: of hidden states, (n, H), and `whole`; logits, (n, C)."""
        graph = fx.Graph()
        inputs = (self.hidden, *self.whole)
        copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
        graph.output(self._copied(graph, copies))
        return graph

    def _copied(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        value = copies[self.hidden]
        for node in self.nodes:
            target: Any = node.target  # an operation, by how it was found
            if target not in _VIEWS:
                rest = fx.node.map_arg(node.args[1:], lambda n: copies.get(n, n))
                value = graph.call_function(target, (value, *rest), node.kwargs)
        return value


def find_head(logits: fx.Node, reader: fx.Node) -> Head | None:
    """Return the head that makes `logits`, (N, C), for `reader` alone; None where there is none.

    A linear layer, and after it only what treats each number by itself and keeps the rows.
    """
    classes = logits.meta["val"].shape[-1]
    nodes: list[fx.Node] = []
    node = logits
    while node.op == "call_function" and set(node.users) == {reader}:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.shape[-1:] != (classes,):
            return None
        nodes.append(node)
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        if node.target is _aten.linear.default:
            return Head(nodes[::-1])
        if not _keeps_rows(node):
            return None
        node, reader = source, node
    return None


def trained_rows(targets: Tensor, ignored: int) -> Tensor:
    """Return the numbers of the targets that are not `ignored`, int64, (n,); in `all_rows` all."""
    if _all:
        return torch.arange(len(targets), device=targets.device)
    return torch.nonzero(targets != ignored)[:, 0]


def skips_ignored(codes: Iterable[fx.GraphModule]) -> bool:
    """Whether one of the segments' codes has a head over the rows that count."""
    nodes = (node for code in codes for node in code.graph.nodes)
    return any(node.target is trained_rows for node in nodes)


@contextmanager
def all_rows() -> Iterator[None]:
    """Compute all rows meanwhile: what they take is what a batch takes at the most."""
    global _all
    before, _all = _all, True
    try:
        yield
    finally:
        _all = before


def _rows_of(hidden: Tensor, rows: Tensor) -> Tensor:
    """Return rows of hidden states of any shape (..., H): (n, H)."""
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)


def _keeps_rows(node: fx.Node) -> bool:
    if node.target in _VIEWS:
        return True
    if node.target is _aten.to.dtype:
        return len(node.args) == 2 and not node.kwargs
    others = [argument for argument in node.args[1:] if isinstance(argument, fx.Node)]
    return node.target in _WITH_NUMBERS and not others and not node.kwargs
