"""What of a model would be smaller or faster made otherwise, as its graph shows, by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

from swaptrain.capture.trace import Trace
from swaptrain.capture.uncut import Uncut
from swaptrain.units import format_size
from swaptrain.verbs.plans.layers import Layer

__all__ = ["layer_hints"]

_aten = torch.ops.aten
_TENSOR_CORES, _VECTORS = 64, 8
_BATCH_NORMS = (_aten.batch_norm.default, _aten.native_batch_norm.default)
_POINTWISE = (
    *(_aten.relu.default, _aten.leaky_relu.default, _aten.hardtanh.default),
    *(_aten.relu6.default, _aten.hardswish.default, _aten.silu.default, _aten.elu.default),
)
_READ_AGAIN = ("softmax", "tanh", "sigmoid", "exp", "relu", "silu", "gelu", "dropout")
"""Parts of names of operations whose backward reads what they made."""
_DOMINATES = 0.25
"""Part of all activations from which on logits are worth a word."""
_SMALL_BYTES = 1 << 20


def layer_hints(
    uncut: Uncut, found: Iterable[Layer], *, on_gpu: bool, channels_last: bool
) -> list[tuple[str, str]]:
    """Return (module, hint) for what follows from the graph alone, modules in the model's order.

    `channels_last` says whether images are laid out so already.
    """
    by_node = {node: one.name for one in found for node in one.nodes}
    nodes = [node for node in uncut.captured.graph.nodes if node in by_node]
    hints = [
        *_sizes(nodes, uncut.trace, on_gpu=on_gpu),
        *_cancelled_biases(nodes),
        *_in_place(nodes, uncut.trace),
        *_logits(nodes, uncut.trace, by_node),
        *([] if channels_last else _images(nodes, uncut.trace)),
    ]
    said: dict[tuple[str, str], None] = {}
    for node, text in hints:
        said.setdefault((by_node[node], text))
    return list(said)


def _shape(node: object, trace: Trace) -> tuple[int, ...]:
    if not isinstance(node, fx.Node) or node not in trace.facts:
        return ()
    tensors = trace.facts[node].tensors
    return tuple(tensors[0].shape) if tensors else ()


def _sizes(nodes: list[fx.Node], trace: Trace, *, on_gpu: bool) -> Iterator[tuple[fx.Node, str]]:
    """Yield layers whose sizes do not divide into what a processor takes at once."""
    unit = _TENSOR_CORES if on_gpu else _VECTORS
    kind = "tensor cores" if on_gpu else "vector units"
    for node in nodes:
        if node.target is not _aten.linear.default:
            continue
        shape = _shape(node.args[1], trace)
        names = zip(("outputs", "inputs"), shape, strict=False)
        for name, size in names:
            if size >= unit and size % unit:
                more = -(-size // unit) * unit
                yield node, f"{size:,} {name}: {more:,}, a multiple of {unit}, suits {kind}"


def _cancelled_biases(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """Yield convolutions whose bias the mean of the batch norm after them takes away."""
    for node in nodes:
        is_convolution = str(node.target).startswith(("aten.conv", "aten.convolution"))
        has_bias = len(node.args) > 2 and isinstance(node.args[2], fx.Node)
        if not is_convolution or not has_bias or len(node.users) != 1:
            continue
        if next(iter(node.users)).target in _BATCH_NORMS:
            yield node, "its bias is cancelled by the batch norm after it: bias=False"


def _in_place(nodes: list[fx.Node], trace: Trace) -> Iterator[tuple[fx.Node, str]]:
    """Yield activation functions that could write over what nothing else reads."""
    for node in nodes:
        source = node.args[0] if node.args else None
        if node.target not in _POINTWISE or not isinstance(source, fx.Node):
            continue
        if source.op != "call_function" or len(source.users) != 1:
            continue
        if any(part in str(source.target) for part in _READ_AGAIN):
            continue
        if node.target in (_aten.silu.default, _aten.hardswish.default, _aten.elu.default):
            continue  # their own backward reads what they were given
        nbytes = sum(t.untyped_storage().nbytes() for t in trace.facts[node].tensors)
        if nbytes >= _SMALL_BYTES:
            yield (
                node,
                f"could be in place ({format_size(nbytes)}): in PyTorch less memory; swaptrain "
                "computes it out of place either way",
            )


def _logits(
    nodes: list[fx.Node], trace: Trace, by_node: Mapping[fx.Node, str]
) -> Iterator[tuple[fx.Node, str]]:
    """Yield the head whose logits are a large part of all activations."""

    def made(node: fx.Node) -> int:
        return sum(
            tensor.untyped_storage().nbytes()
            for tensor in trace.facts[node].tensors
            if trace.origin[int(tensor.untyped_storage()._cdata)] is node
        )

    total = sum(map(made, nodes))
    losses = [node for node in nodes if node.target is _aten.cross_entropy_loss.default]
    for loss in losses:
        head = _maker(loss.args[0])
        if head is None or head not in by_node:
            continue
        nbytes = made(head)
        if nbytes >= max(_SMALL_BYTES, _DOMINATES * total):
            yield (
                head,
                f"its logits are {format_size(nbytes)}, {nbytes / total:.0%} of all activations: "
                "a smaller data.micro_batch with more data.micro_batches, or train.skip_ignored "
                "where many labels are -100",
            )


def _maker(node: object) -> fx.Node | None:
    """Return the layer that logits come from, through casts and views."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in (_aten.linear.default, _aten.addmm.default, _aten.matmul.default):
            return node
        node = node.args[0] if node.args else None
    return None


def _images(nodes: list[fx.Node], trace: Trace) -> Iterator[tuple[fx.Node, str]]:
    """Yield the first convolution of images, where their channels do not come last in memory."""
    for node in nodes:
        convolves = str(node.target).startswith(("aten.conv2d", "aten.convolution"))
        if convolves and len(_shape(node, trace)) == 4:
            yield node, "images: train.channels_last=true may compute convolutions faster"
            return
