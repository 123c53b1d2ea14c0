"""The operations that losses are made of, and what can be asked of a node of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from swaptrain.capture.trace import Trace, is_random, resolve_attribute

__all__ = ["ADDED", "COUNT_CHAIN", "ENTROPIES", "EPSILON", "JOINED", "MEAN", "MEANS", "PARTS"]
__all__ += [
    "PICKS",
    "SAME",
    "SCALED",
    "SUM",
    "SUMS",
    "ancestors",
    "arguments",
    "fixed_nodes",
    "holds_entropy",
]
__all__ += ["is_entropy", "is_logarithm", "picks_classes"]

_aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers of the reductions."""
ENTROPIES = (_aten.cross_entropy_loss.default, _aten.nll_loss_nd.default, _aten.nll_loss.default)
OTHER_ENTROPIES = (
    _aten.binary_cross_entropy_with_logits.default,
    _aten.binary_cross_entropy.default,
)
SAME = {
    *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default),
    *(_aten.view.default, _aten.reshape.default, _aten.alias.default, _aten.clone.default),
    *(_aten.contiguous.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.unsqueeze.default),
    *(_aten.neg.default, _aten.sum.default, _aten.sum.dim_IntList, _aten.nan_to_num.default),
    *(_aten.mean.default, _aten.mean.dim, _aten.flatten.using_ints, _aten.select.int),
}
"""Linear in their first argument, without another."""
SCALED = {
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.dot.default,
}
ADDED = {_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar, _aten.rsub.Scalar}
JOINED = {_aten.stack.default, _aten.cat.default}
SUMS = {
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.dot.default, _aten.einsum.default),
    *(_aten.count_nonzero.default, _aten.count_nonzero.dim_IntList),
}
MEANS = {_aten.mean.default, _aten.mean.dim}
COUNT_CHAIN = {
    *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default),
    *(_aten.clamp.default, _aten.clamp_min.default, _aten.add.Tensor),
    *(_aten.view.default, _aten.reshape.default, _aten.alias.default, _aten.detach.default),
    *(_aten.squeeze.default, _aten.clone.default),
}
"""What may lie between a count and the division by it; all but the count are numbers."""
EPSILON = 1e-3
"""The most that is added to a count against a division by 0."""
PARTS = {
    *(_aten.select.int, _aten.unbind.int, _aten.slice.Tensor, _aten.split.Tensor),
    *(_aten.split.sizes, _aten.split_with_sizes.default, _aten.chunk.default),
    *(_aten.narrow.default, _aten.index_select.default),
}
"""Take a part along a dimension."""
LOGARITHMS = (_aten.log_softmax.int, _aten._log_softmax.default)
PICKS = (_aten.gather.default, _aten.take_along_dim.default)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operation by their names in its schema."""
    target: Any = node.target
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given.update(zip(given, node.args, strict=False))
    return given | node.kwargs


def holds_entropy(owner: torch.nn.Module, node: fx.Node) -> bool:
    """Whether a node fetches the body of a region (autocast, no gradients) with a cross entropy."""
    if node.op != "get_attr":
        return False
    body = resolve_attribute(owner, str(node.target))
    return isinstance(body, fx.GraphModule) and any(
        is_entropy(inner) or holds_entropy(body, inner) for inner in body.graph.nodes
    )


def is_logarithm(node: Any) -> bool:
    """Whether a value is the logarithm of a softmax, through casts, views and signs."""
    while isinstance(node, fx.Node) and node.target in SAME and node.args:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in LOGARITHMS


def picks_classes(node: fx.Node) -> bool:
    """Whether it is a cross entropy of class numbers, not of probabilities."""
    if node.op != "call_function" or node.target not in ENTROPIES:
        return False
    value = arguments(node)["target"].meta.get("val")
    return not (isinstance(value, torch.Tensor) and value.is_floating_point())


def is_entropy(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (*ENTROPIES, *OTHER_ENTROPIES)


def ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all that they come of."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def fixed_nodes(captured: fx.GraphModule, trace: Trace) -> set[fx.Node]:
    """Return the nodes that are the same for all micro-batches of a step: no batch, no draws."""
    written: set[int] = set().union(*(facts.written for facts in trace.facts.values()))
    fixed: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            value = resolve_attribute(captured, str(node.target))
            if isinstance(value, torch.Tensor) and not trace.facts[node].touched & written:
                fixed.add(node)
        elif (
            node.op == "call_function"
            and not is_random(node)
            and all(argument in fixed for argument in node.all_input_nodes)
        ):
            fixed.add(node)
    return fixed
