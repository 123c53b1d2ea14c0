"""Counts the trained tokens of a micro-batch on the host, before any of it is computed.

What a loss is a mean of is counted where the loss reads its targets, after whatever the model does
to the labels: a shift by one position, padding, ids that are not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from swaptrain.capture.trace import Trace, is_random, resolve_attribute

__all__ = ["Counter", "Target", "batch_alone", "counter", "needed"]

_aten = torch.ops.aten
_KEEPS_IDS = {
    *(_aten.slice.Tensor, _aten.select.int, _aten.view.default, _aten.reshape.default),
    *(_aten.contiguous.default, _aten.clone.default, _aten.alias.default, _aten.detach.default),
    *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default),
    *(_aten.flatten.using_ints, _aten.transpose.int, _aten.squeeze.default, _aten.squeeze.dim),
    *(_aten.unsqueeze.default, _aten.pad.default, _aten.constant_pad_nd.default),
}
"""Operations whose results mark no id as not trained that was trained before, at other places."""


class Target:
    """Where one term of a loss finds what it counts."""

    def __init__(
        self,
        node: fx.Node,
        *,
        ignore_index: int | None,
        weight: fx.Node | None = None,
        elements: int = 1,
    ) -> None:
        """Take class numbers and the one that is not trained; or, if that is None, a count.

        With the `weight` of each class its mean divides by the weights of the targets. A count that
        is a mean says of how many `elements`: batches of unequally many items have others.
        """
        self.node, self.ignore_index, self.weight = node, ignore_index, weight
        self.elements = elements

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What has to be computed to count."""
        return (self.node,) if self.weight is None else (self.node, self.weight)

    def count(self, found: Tensor, weight: Tensor | None) -> float:
        """Return the trained targets of a micro-batch, or the sum of their weights, in float64."""
        if self.ignore_index is None:
            return float(found) * self.elements
        trained = found != self.ignore_index
        if weight is None:
            return float(trained.sum())
        known = trained & (found >= 0) & (found < len(weight))  # the loss itself refuses others
        return float(weight.double()[found[known]].sum())


class Counter:
    """Counts, for each counted term of a loss, the trained tokens of a micro-batch."""

    def __init__(
        self, code: fx.GraphModule, keys: Sequence[str], targets: Sequence[Target]
    ) -> None:
        self._code, self._targets = code, tuple(targets)
        self.keys = tuple(keys)
        """The tensors of a micro-batch that it reads."""

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[float, ...]:
        """Return the counts by term; the batch is on the CPU, in the dtypes of the model."""
        with torch.no_grad():
            found = list(self._code(*(batch[key].clone() for key in self.keys)))
        return tuple(
            target.count(found.pop(0), found.pop(0) if target.weight is not None else None)
            for target in self._targets
        )

    @property
    def terms(self) -> int:
        """How many terms it counts."""
        return len(self._targets)

    @property
    def reads(self) -> frozenset[str]:
        """The attributes of the model that it reads."""
        return frozenset(str(n.target) for n in self._code.graph.nodes if n.op == "get_attr")

    @property
    def every_id_counts(self) -> bool:
        """Whether equally many are counted of any two micro-batches whose labels are all ids.

        So it is of text and tokens, where nothing is masked.
        """
        return all(
            target.weight is None and target.ignore_index is not None and target.ignore_index < 0
            for target in self._targets
        ) and all(
            node.target in _KEEPS_IDS
            for node in self._code.graph.nodes
            if node.op == "call_function"
        )


def counter(
    captured: fx.GraphModule, trace: Trace, keys: Sequence[str], targets: Sequence[Target]
) -> Counter:
    """Return the counter of these targets, which depend on the batch alone.

    `keys` are those of the batch in the order of the graph's placeholders.
    """
    wanted = [node for target in targets for node in target.nodes]
    kept = needed(trace, wanted)
    names = dict(zip(_placeholders(captured), keys, strict=True))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    read = []
    for node in captured.graph.nodes:
        if node in kept and node.op == "placeholder":
            read.append(names[node])
            copies[node] = graph.placeholder(f"input_{len(read) - 1}")
    for node in captured.graph.nodes:
        if node in kept and node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in wanted))
    return Counter(fx.GraphModule(captured, graph), read, targets)


def _placeholders(captured: fx.GraphModule) -> list[fx.Node]:
    return [node for node in captured.graph.nodes if node.op == "placeholder"]


def needed(trace: Trace, wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that these come of, those that write to what they read among them."""
    order = {node: i for i, node in enumerate(trace.facts)}
    writers = [n for n, facts in trace.facts.items() if facts.written]
    found: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(node.all_input_nodes)
        storages: set[int] = set().union(*(trace.facts[n].touched for n in found))
        last = max(order[node] for node in found)
        waiting = [
            n
            for n in writers
            if n not in found and order[n] < last and trace.facts[n].written & storages
        ]
    return found


def batch_alone(captured: fx.GraphModule, trace: Trace) -> set[fx.Node]:
    """Return the nodes that depend on the batch and on constants, and on nothing else.

    Not on parameters, draws, or buffers that a forward changes.
    """
    written: set[int] = set().union(*(facts.written for facts in trace.facts.values()))
    alone: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            value: Any = resolve_attribute(captured, str(node.target))
            fixed = isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)
            if fixed and not trace.facts[node].touched & written:
                alone.add(node)
        elif node.op == "placeholder" or (
            node.op == "call_function"
            and not is_random(node)
            and all(argument in alone for argument in node.all_input_nodes)
        ):
            alone.add(node)
    return alone
