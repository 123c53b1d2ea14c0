"""Finds the terms of a captured loss, and which of them are means over trained tokens.

From the loss down, as far as operations are linear in it: sums, products with what no batch
changes, casts and views. What is found below is a term. A cross entropy whose targets depend on
the batch alone, and a sum of cross entropies divided by a count of the batch, are counted terms.
The others (auxiliary losses, penalties) are not. Where a cross entropy is hidden in one of these,
the loss is not additive in it, and tokens cannot be weighted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from swaptrain.capture.losses.counting import Counter, Target, batch_alone, counter, needed
from swaptrain.capture.losses.operations import (
    ADDED,
    COUNT_CHAIN,
    ENTROPIES,
    EPSILON,
    JOINED,
    MEAN,
    MEANS,
    PARTS,
    PICKS,
    SAME,
    SCALED,
    SUM,
    SUMS,
    ancestors,
    arguments,
    fixed_nodes,
    holds_entropy,
    is_entropy,
    is_logarithm,
    picks_classes,
)
from swaptrain.capture.trace import Trace

__all__ = ["LossTerms", "loss_terms"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class LossTerms:
    """The terms of a loss as marks on the nodes of its graph, by which segments are rewritten."""

    entropies: Mapping[fx.Node, int] = field(default_factory=dict)
    """Cross entropies that are means, and the number of their term."""
    quotients: Mapping[fx.Node, int] = field(default_factory=dict)
    """Divisions of a sum of cross entropies by a count."""
    elements: Mapping[fx.Node, int] = field(default_factory=dict)
    """By such a division: of how many elements both are the mean; 1 for sums."""
    shared: Mapping[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    """By a node that adds: those of its arguments that are terms which count nothing."""
    counter: Counter | None = None
    """None where tokens cannot be weighted."""
    reason: str = ""
    """Why they cannot."""


def loss_terms(
    captured: fx.GraphModule, trace: Trace, keys: Sequence[str], loss: fx.Node
) -> LossTerms:
    """Return the terms of the loss of a captured graph.

    `keys` are those of the batch in the order of the graph's placeholders.
    """
    walk = _TermWalk(captured, trace)
    reason = walk.descend(loss)
    if not reason and not walk.targets:
        reason = "it has no cross entropy that is a mean over the labels of a batch"
    if reason:
        return LossTerms(reason=reason)
    return LossTerms(
        entropies=walk.entropies,
        quotients=walk.quotients,
        elements=walk.elements,
        shared={user: frozenset(children) for user, children in walk.shared.items()},
        counter=counter(captured, trace, keys, walk.targets),
    )


class _TermWalk:
    """Goes down from the loss and collects its terms."""

    def __init__(self, captured: fx.GraphModule, trace: Trace) -> None:
        self._captured, self._trace = captured, trace
        self._alone = batch_alone(captured, trace)
        self._fixed = fixed_nodes(captured, trace)
        self.targets: list[Target] = []
        self.entropies: dict[fx.Node, int] = {}
        self.quotients: dict[fx.Node, int] = {}
        self.elements: dict[fx.Node, int] = {}
        self.shared: dict[fx.Node, set[fx.Node]] = {}

    def descend(self, loss: fx.Node) -> str:
        """Collect the terms; return why tokens cannot be weighted, or nothing."""
        inside: set[fx.Node] = set()
        leaves: set[fx.Node] = set()
        waiting = [loss]
        while waiting:
            node = waiting.pop()
            if node in inside or node in leaves:
                continue
            children = () if self._is_term(node) else tuple(self._linear(node))
            if not children and not self._is_term(node):
                leaves.add(node)
                continue
            inside.add(node)
            waiting.extend(children)
        for node in self._trace.facts:
            if node in inside and self._is_term(node):
                self._add(node)
        if not self.targets:
            return self._why_none(leaves)
        if any(self._divides_items(target.nodes) for target in self.targets):
            return "it is a mean for some of the items of a micro-batch by themselves"
        counted = self._above_terms(inside)
        for node in counted:
            if node is not loss and any(user not in counted for user in node.users):
                return f"its part {node.name} is read by more than a sum of terms"
        for leaf in (inside | leaves) - counted:
            if hidden := self._hidden(leaf):
                return hidden
        for node in counted - self._terms():
            shared = {child for child in self._linear(node) if child not in counted}
            if shared or self._adds_number(node):
                self.shared[node] = shared
        return ""

    def _terms(self) -> set[fx.Node]:
        return {*self.entropies, *self.quotients}

    def _above_terms(self, inside: set[fx.Node]) -> set[fx.Node]:
        """Return the terms and the linear nodes that have one below them."""
        counted: set[fx.Node] = set()
        waiting = list(self._terms())
        while waiting:
            node = waiting.pop()
            if node in inside and node not in counted:
                counted.add(node)
                waiting.extend(node.users)
        return counted

    def _add(self, node: fx.Node) -> None:
        number = len(self.targets)
        if node.target in ENTROPIES:
            given = arguments(node)
            weight = given["weight"]
            self.targets.append(
                Target(given["target"], ignore_index=given["ignore_index"], weight=weight)
            )
            self.entropies[node] = number
        else:
            count = self._count_of(node.args[1])
            assert count is not None, "a term has one"
            elements = self._numel(count.all_input_nodes[0]) if count.target in MEANS else 1
            self.targets.append(Target(count, ignore_index=None, elements=elements))
            self.quotients[node], self.elements[node] = number, elements

    def _divides_items(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether what is counted is of some of a micro-batch's items, not of all."""
        sizes = {
            f.tensors[0].shape[:1] for n, f in self._trace.facts.items() if n.op == "placeholder"
        }
        if len(sizes) != 1:
            return False
        (size,) = sizes
        for node in needed(self._trace, nodes):
            source = node.args[0] if node.args else None
            if node.target not in PARTS or not isinstance(source, fx.Node):
                continue
            whole, made = (self._trace.facts[n].tensors for n in (source, node))
            dim = arguments(node).get("dim", 0)
            if len(whole) != 1 or whole[0].shape[:1] != size or dim % whole[0].dim():
                continue
            if size != (1,) and any(part.shape[:1] != size for part in made):
                return True
            if size != (1,) and node.target is _aten.select.int:
                return True
        return False

    def _is_term(self, node: fx.Node) -> bool:
        return self._is_mean_entropy(node) or self._is_quotient(node)

    def _is_mean_entropy(self, node: fx.Node) -> bool:
        if not picks_classes(node):
            return False
        given = arguments(node)
        weight = given["weight"]
        return (
            given["reduction"] == MEAN
            and self._is_countable(given["target"])
            and (weight is None or self._is_countable(weight))
        )

    def _is_countable(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and needed(self._trace, [node]) <= self._alone

    def _is_quotient(self, node: fx.Node) -> bool:
        """Whether it divides a sum of cross entropies by a count, as hand-written means do."""
        if node.target is not _aten.div.Tensor or len(node.args) < 2:
            return False
        above, below = node.args
        if not isinstance(above, fx.Node) or not isinstance(below, fx.Node):
            return False
        count = self._count_of(below)
        if count is None or not self._is_countable(count):
            return False
        return self._is_sum(above, MEANS if count.target in MEANS else SUMS) and any(
            is_entropy(n) or self._picks_targets(n) for n in ancestors([above])
        )

    def _count_of(self, node: Any) -> fx.Node | None:
        """Return the sum over the batch that a denominator is, through casts and clamps."""
        while isinstance(node, fx.Node) and node in self._alone and self._numel(node) == 1:
            if node.target in SUMS | MEANS:
                return node if node not in self._fixed else None
            if node.target not in COUNT_CHAIN or not self._keeps_count(node):
                return None
            node = node.args[0]
        return None

    def _keeps_count(self, node: fx.Node) -> bool:
        """Whether an operation between a count and a division changes no count from 1 on."""
        given = arguments(node)
        if node.target is _aten.add.Tensor:
            return isinstance(given["other"], float) and abs(given["other"]) <= EPSILON
        if node.target in (_aten.clamp.default, _aten.clamp_min.default):
            least = given["min"]
            return isinstance(least, int | float) and least <= 1 and given.get("max") is None
        return True

    def _is_sum(self, node: Any, kinds: set[Any]) -> bool:
        """Whether a numerator, [], is a sum of the kind that its count is."""
        if not isinstance(node, fx.Node) or self._numel(node) != 1:
            return False
        if node.target in kinds:
            return True
        if is_entropy(node):
            return kinds is SUMS and arguments(node)["reduction"] == SUM
        children = tuple(self._linear(node)) if node.target not in SUMS | MEANS else ()
        return bool(children) and all(self._is_sum(child, kinds) for child in children)

    def _picks_targets(self, node: fx.Node) -> bool:
        """Whether it takes the logarithms of the targets' probabilities, by an index or a mask."""
        if node.op != "call_function":
            return False
        of_batch = [n for n in node.all_input_nodes[1:] if n in self._alone - self._fixed]
        if node.target in PICKS:
            return bool(of_batch)
        if node.target is _aten.index.Tensor:
            return bool(of_batch) and is_logarithm(node.args[0])
        if node.target is not _aten.mul.Tensor:
            return False
        first, second = node.args[:2]
        return any(
            is_logarithm(one) and other in self._alone - self._fixed
            for one, other in ((first, second), (second, first))
        )

    def _numel(self, node: fx.Node) -> int:
        facts = self._trace.facts.get(node)
        return facts.tensors[0].numel() if facts is not None and len(facts.tensors) == 1 else 0

    def _linear(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the arguments that a node is linear in, where it is and others are fixed."""
        if node.op != "call_function" or not node.args:
            return
        first, rest = node.args[0], list(node.args[1:])
        nodes = [a for a in node.args if isinstance(a, fx.Node)]
        if node.target in SAME and isinstance(first, fx.Node):
            yield first
        elif node.target in ADDED:
            yield from dict.fromkeys(nodes)
        elif node.target in JOINED:
            yield from dict.fromkeys(node.all_input_nodes)
        elif (
            node.target is _aten.where.self
            and nodes[0] in self._alone
            and nodes[0] not in nodes[1:]
        ):
            yield from dict.fromkeys(nodes[1:])
        elif node.target in SCALED and isinstance(first, fx.Node):
            if all(not isinstance(a, fx.Node) or a in self._fixed for a in rest):
                yield first
            elif "div" not in str(node.target) and first in self._fixed:
                yield from nodes[1:]

    def _adds_number(self, node: fx.Node) -> bool:
        return node.target in ADDED and any(
            isinstance(a, int | float) and a for a in node.args[1:2]
        )

    def _why_none(self, leaves: set[fx.Node]) -> str:
        for leaf in leaves:
            if hidden := self._hidden(leaf):
                return hidden
        if any(holds_entropy(self._captured, node) for node in self._captured.graph.nodes):
            return "its cross entropy is in a region of its own, such as of torch.autocast"
        return ""

    def _hidden(self, leaf: fx.Node) -> str:
        """Say why a cross entropy inside of a term that counts nothing cannot be weighted."""
        inner = ancestors([leaf])
        for node in inner:
            if picks_classes(node) and arguments(node)["reduction"] == MEAN:
                if not self._is_countable(arguments(node)["target"]):
                    return "the targets of its cross entropy do not come of the batch alone"
                return "its cross entropy enters it otherwise than as a term of a sum"
        if any(is_entropy(n) or self._picks_targets(n) for n in inner):
            for node in inner:
                below = node.args[1] if len(node.args) > 1 else None
                if "div" in str(node.target) and below in self._alone - self._fixed:
                    return "it divides its cross entropies by counts in a way that is not known"
        return ""
