"""The evaluation form of a training graph: no dropout, running statistics, nothing mutated."""

from __future__ import annotations

import copy

import torch
from torch import fx

from swaptrain.capture.randomness import reseed

__all__ = ["evaluation_graph"]

_aten = torch.ops.aten

# Operation -> (argument that says training or the dropout probability, its evaluation value).
_SWITCHES: dict[object, tuple[str, object]] = {
    _aten.dropout.default: ("train", False),
    _aten.feature_dropout.default: ("train", False),
    _aten.alpha_dropout.default: ("train", False),
    _aten.feature_alpha_dropout.default: ("train", False),
    _aten.rrelu.default: ("training", False),
    _aten.batch_norm.default: ("training", False),
    _aten.native_batch_norm.default: ("training", False),
    _aten.cudnn_batch_norm.default: ("training", False),
    _aten.lstm.input: ("train", False),
    _aten.gru.input: ("train", False),
    _aten.rnn_tanh.input: ("train", False),
    _aten.rnn_relu.input: ("train", False),
    _aten.scaled_dot_product_attention.default: ("dropout_p", 0.0),
}


def evaluation_graph(train: fx.GraphModule) -> fx.GraphModule:
    """Return `train` with the training switches of its operations turned off.

    A module whose forward branches on `self.training` itself, beyond torch's own layers, is
    evaluated with the training branch: that branch was captured. Batch norms without running
    statistics keep using the batch's. Returns `train` itself when there is nothing to switch.
    """
    if not any(node.target in _SWITCHES or _only_writes(node) for node in train.graph.nodes):
        return train
    graph = copy.deepcopy(train.graph)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _SWITCHES:
            continue
        name, value = _SWITCHES[node.target]
        arguments = node.target._schema.arguments
        position = next(i for i, argument in enumerate(arguments) if argument.name == name)
        if "batch_norm" in str(node.target) and node.args[3] is None:
            continue
        if position < len(node.args):
            node.update_arg(position, value)
        elif name in node.kwargs:
            node.update_kwarg(name, value)
    for node in reversed(list(graph.nodes)):
        if _only_writes(node):
            graph.erase_node(node)
    return fx.GraphModule(train, graph)


def _only_writes(node: fx.Node) -> bool:
    """Whether it is an in-place result that nobody uses, such as the counter of a batch norm."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or node.users or node.target is reseed:
        return False
    return schema is not None and schema.is_mutable
