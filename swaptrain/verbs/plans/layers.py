"""A captured model layer by layer: what each one weighs and computes, by the modules' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch import fx

from swaptrain.capture.costs import node_flops
from swaptrain.capture.uncut import Uncut
from swaptrain.compute.update import Rules
from swaptrain.program.model import ParameterSpec
from swaptrain.program.tensors import ITEMSIZE

__all__ = ["Layer", "layers", "module_of"]


@dataclass
class Layer:
    """One module that has parameters or computes, of one micro-batch."""

    name: str
    """The module's, such as `model.layers.0.mlp.up_proj`; empty for the model itself."""
    parameters: int = 0
    trained: int = 0
    """Of the parameters."""
    weight_bytes: int = 0
    """As computed with."""
    gradient_bytes: int = 0
    state_bytes: int = 0
    """On the disk beside the weights: remainders of masters, and the optimizer's."""
    activation_bytes: int = 0
    """Of all tensors that its operations make in one forward."""
    flops: int = 0
    """Of matrix products in one forward, two a multiply-add."""
    nodes: list[fx.Node] = field(default_factory=list, repr=False)
    """Its operations in the captured graph, in order."""

    def figures(self) -> dict[str, int | str]:
        """Return the numbers by name."""
        return {key: value for key, value in vars(self).items() if key != "nodes"}

    @property
    def total_bytes(self) -> int:
        """By which layers are sorted: what it weighs in a step that holds all of it."""
        held = self.weight_bytes + self.gradient_bytes + self.state_bytes
        return held + self.activation_bytes


def layers(uncut: Uncut, rules: Rules, *, gradient_itemsize: int = 4) -> list[Layer]:
    """Return the layers of a captured model, the largest first.

    Operations belong to the innermost module that has parameters of its own, or else to the one
    that called them. A tied parameter belongs to the module that it is named after. `rules` say
    what an optimizer keeps of a parameter; a gradient's element takes `gradient_itemsize` bytes.
    """
    found: dict[str, Layer] = {}

    def layer(name: str) -> Layer:
        return found.setdefault(name, Layer(name))

    owners = {name.rpartition(".")[0] for name in uncut.parameters}
    for name, parameter in uncut.parameters.items():
        _add_parameter(layer(name.rpartition(".")[0]), parameter, rules, gradient_itemsize)
    for node in uncut.captured.graph.nodes:
        if node.op != "call_function" or node not in uncut.trace.facts:
            continue
        one = layer(module_of(node, owners))
        one.nodes.append(node)
        one.flops += node_flops(node, uncut.trace)
        one.activation_bytes += sum(
            tensor.untyped_storage().nbytes()
            for tensor in uncut.trace.facts[node].tensors
            if uncut.trace.origin[int(tensor.untyped_storage()._cdata)] is node
        )
    return sorted(found.values(), key=lambda one: (-one.total_bytes, one.name))


def _add_parameter(one: Layer, parameter: ParameterSpec, rules: Rules, itemsize: int) -> None:
    tensor = parameter.tensor
    one.parameters += tensor.numel
    one.weight_bytes += sum(stored.nbytes for stored in parameter.stored)
    if parameter.trainable:
        one.trained += tensor.numel
        one.gradient_bytes += itemsize * tensor.numel
        kept = rules(tensor.name).stored(tensor.shape)
        one.state_bytes += 2 * tensor.numel * parameter.split + sum(
            ITEMSIZE[dtype] * max(1, prod(shape)) for shape, dtype in kept.values()
        )


def module_of(node: fx.Node, owners: set[str]) -> str:
    """Return the name of the module that a node belongs to, of `owners` where one called it."""
    stack: Mapping[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    names = [_plain(path) for path, _ in stack.values()]
    return next((name for name in reversed(names) if name in owners), names[-1] if names else "")


def _plain(path: str) -> str:
    """Return a module's path as the model names it: without what an export puts before it."""
    for prefix in ("L['self'].", "L__self___"):
        path = path.removeprefix(prefix)
    path = path.removeprefix("model.") if path.startswith("model.") else path
    return "" if path in ("model", "L['self']") else path
