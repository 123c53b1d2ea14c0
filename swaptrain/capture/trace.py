"""Runs a captured graph once on fake tensors to learn what each node makes, aliases and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from swaptrain.capture.checks.batch_values import BatchValues
from swaptrain.capture.checks.operation import KNOWN, is_check, is_scalar
from swaptrain.capture.guards.layouts import refuse_sparse
from swaptrain.errors import CaptureError

__all__ = [
    "READS_VALUES",
    "NodeFacts",
    "Trace",
    "bodies",
    "has_effect",
    "is_random",
    "may_write",
    "resolve_attribute",
    "trace_graph",
]

READS_VALUES = "reads values"
"""Key of `meta` of a captured graph whose code was told values of the first micro-batch."""

# Their schemas do not say that they write the running statistics (arguments 3 and 4 when training).
_WRITES_STATISTICS: Mapping[object, tuple[int, int, int]] = {
    torch.ops.aten.batch_norm.default: (3, 4, 5),
    torch.ops.aten.native_batch_norm.default: (3, 4, 5),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4, 5),
    torch.ops.aten.instance_norm.default: (3, 4, 5),
}


@dataclass
class NodeFacts:
    """What one node of the graph did to memory; storages are keys of `Trace.origin`."""

    tensors: tuple[torch.Tensor, ...]
    """Its outputs, fake; one for a plain operation."""
    touched: frozenset[int]
    """Storages that it reads, writes or returns."""
    written: frozenset[int]
    out_of_place: Any = None
    """The twin of an in-place operation, when it gives the same dtype, shape and strides."""


@dataclass
class Trace:
    """Facts of every node, and of the loss."""

    facts: dict[fx.Node, NodeFacts]
    origin: dict[int, fx.Node]
    """The node that made each storage."""
    loss: torch.Tensor
    fake_mode: FakeTensorMode
    reached: set[object] = field(default_factory=set)
    """Autograd nodes that the loss's gradient passes, and the leaves at their ends."""
    answers: dict[fx.Node, object] = field(default_factory=dict)
    """Values of the first micro-batch, and tensors whose shapes depend on them, that the code of
    the model was captured with: by the node that asks."""

    def made_bytes(self, node: fx.Node) -> int:
        """Return the bytes that an operation allocates for what it makes."""
        return sum(
            tensor.untyped_storage().nbytes()
            for tensor in self.facts[node].tensors
            if self.origin[int(tensor.untyped_storage()._cdata)] is node
        )

    def gets_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether the backward of the loss sends a gradient into `tensor`."""
        if not tensor.requires_grad:
            return False
        return (id(tensor) if tensor.grad_fn is None else tensor.grad_fn) in self.reached


def trace_graph(
    captured: fx.GraphModule,
    fake_mode: FakeTensorMode,
    batch: Mapping[str, torch.Tensor],
    *,
    gradients: bool = True,
) -> Trace:
    """Execute `captured` under `fake_mode` in grad mode; no memory is used for tensors.

    Without `gradients`, of a graph that is only evaluated, not in grad mode.
    """
    facts: dict[fx.Node, NodeFacts] = {}
    origin: dict[int, fx.Node] = {}
    values: dict[fx.Node, Any] = {}
    inputs = iter(batch.values())
    loss: torch.Tensor | None = None
    answers: dict[fx.Node, object] = {}
    values_known = BatchValues(fake_mode) if captured.meta.get(READS_VALUES) else None
    with fake_mode, values_known or contextlib.nullcontext(), torch.set_grad_enabled(gradients):
        for node in captured.graph.nodes:
            if node.op == "output":
                loss = pytree.tree_leaves(fx.node.map_arg(node.args, lambda n: values[n]))[0]
                continue
            twin = None
            before: list[tuple[torch.Tensor, int]] = []
            arguments: list[torch.Tensor] = []
            if node.op == "placeholder":
                real = next(inputs)
                result: Any = fake_mode.from_tensor(real)
                if values_known is not None:
                    values_known.know(result, real)
            elif node.op == "get_attr":
                result = resolve_attribute(captured, str(node.target))
                if isinstance(result, torch.Tensor) and not isinstance(result, torch.nn.Parameter):
                    real, result = result, fake_mode.from_tensor(result)
                    if values_known is not None and not isinstance(real, FakeTensor):
                        values_known.know(result, real)
            else:
                args = fx.node.map_arg(node.args, lambda n: values[n])
                kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
                arguments = _tensors((args, kwargs))
                before = [(tensor, tensor._version) for tensor in arguments]
                if is_scalar(node) or is_check(node):
                    result = None  # a number that fakes do not have, and only assertions read
                    if node.target is KNOWN and values_known is not None:
                        answers[node] = values_known.real(args[0])
                else:
                    asked = values_known.answers if values_known is not None else 0
                    twin = _out_of_place(node, args, kwargs)
                    result = node.target(*args, **kwargs)
                    if values_known is not None and values_known.answers > asked:
                        answers[node] = result
            values[node] = result
            outputs = _tensors(result)
            refuse_sparse(node, outputs)
            written = {_storage(t) for t, version in before if t._version != version}
            written |= _declared_writes(node, values)
            for tensor in outputs:
                origin.setdefault(_storage(tensor), node)
            facts[node] = NodeFacts(
                tensors=tuple(outputs),
                touched=frozenset(_storage(t) for t in (*arguments, *outputs)),
                written=frozenset(written),
                out_of_place=twin,
            )
    if loss is None or (gradients and not loss.requires_grad):
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: nothing to train"
        )
    if loss.is_leaf and gradients:
        raise CaptureError(
            "the forward returns a parameter itself as its loss, and computes nothing that could "
            "be trained by segments: return a number that is computed from the micro-batch"
        )
    return Trace(facts, origin, loss, fake_mode, _reachable(loss), answers)


def resolve_attribute(owner: torch.nn.Module, target: str) -> Any:
    """Return the attribute at the dotted path `target`."""
    found: Any = owner
    for part in target.split("."):
        found = getattr(found, part)
    return found


def is_random(node: fx.Node) -> bool:
    """Whether the operation, or one in the body of a higher-order one, may draw random numbers."""
    if node.op != "call_function":
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    return any(is_random(inner) for body, _ in bodies(node) for inner in body.graph.nodes)


def bodies(node: fx.Node) -> list[tuple[fx.GraphModule, tuple[Any, ...]]]:
    """Return what a higher-order operation runs (a region without gradients), with its operands."""
    found = []
    for position, argument in enumerate(node.args if node.op == "call_function" else ()):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            owner = argument.graph.owning_module
            assert owner is not None
            body = resolve_attribute(owner, str(argument.target))
            if isinstance(body, fx.GraphModule):
                found.append((body, node.args[position + 1 :]))
    return found


def has_effect(node: fx.Node) -> bool:
    """Whether a node has to stay though nobody reads its result: it writes, or it asserts."""
    if node.op in ("placeholder", "output") or is_check(node):
        return True
    return node.op == "call_function" and may_write(node)


def may_write(node: fx.Node) -> bool:
    """Whether a call whose result nobody reads may do something all the same.

    Norms with running statistics do not say in their schemas that they write them.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return "getitem" not in str(node.target)
    name = str(node.target)
    return bool(schema.is_mutable or "batch_norm" in name or "instance_norm" in name)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _declared_writes(node: fx.Node, values: Mapping[fx.Node, Any]) -> set[int]:
    """Return the storages that the operation's schema, or our list, says it writes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function":
        return set()
    if schema is None:
        return _written_inside(node, values)
    positions: Iterable[int] = (
        i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
    )
    listed = _WRITES_STATISTICS.get(node.target)
    if listed is not None and len(node.args) > listed[2] and node.args[listed[2]]:
        positions = (*positions, *listed[:2])
    written: set[int] = set()
    for position in positions:
        argument = node.args[position] if position < len(node.args) else None
        name = schema.arguments[position].name
        argument = node.kwargs.get(name, argument)
        if isinstance(argument, fx.Node):
            written |= {_storage(t) for t in _tensors(values[argument])}
    return written


def _written_inside(node: fx.Node, values: Mapping[fx.Node, Any]) -> set[int]:
    """Return the storages of operands that a higher-order operation's body says it writes.

    A batch norm in a region without gradients does not change the version of its statistics.
    """
    written: set[int] = set()
    for body, operands in bodies(node):
        placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        given = dict(zip(placeholders, operands, strict=False))
        inside = {inner: values[o] for inner, o in given.items() if isinstance(o, fx.Node)}
        for inner in body.graph.nodes:
            known = {n: inside.get(n) for n in inner.all_input_nodes}
            written |= _declared_writes(inner, known)
    return written


def _out_of_place(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return the out-of-place twin of an in-place operation if its result is laid out alike."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.endswith("_") or schema.name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-1], None)
    twin = getattr(packet, target._overloadname, None)
    if twin is None or not args or not isinstance(args[0], torch.Tensor):
        return None
    with torch.no_grad():
        try:
            result = twin(*args, **kwargs)
        except (RuntimeError, TypeError):  # the twin takes other arguments: keep the original
            return None
    source = args[0]
    same = isinstance(result, torch.Tensor) and (
        (result.dtype, result.shape, result.stride())
        == (source.dtype, source.shape, source.stride())
    )
    return twin if same and _same_backward(target, twin, args, kwargs) else None


def _same_backward(target: Any, twin: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd differentiates an operation in place and its twin by the same formulas.

    `copy` has none, unlike `copy_`; and that of `elu_` reads its result, that of `elu` its input,
    which gives other last bits.
    """
    if not any(tensor.requires_grad for tensor in _tensors((args, kwargs))):
        return True

    def formulas(operation: Any) -> list[str]:
        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            copy = leaf.detach().clone()
            return copy.requires_grad_().clone() if leaf.requires_grad else copy

        given, named = pytree.tree_map(fresh, (args, kwargs))
        with torch.enable_grad():
            return _names(operation(*given, **named).grad_fn)

    try:
        return formulas(target) == formulas(twin)
    except RuntimeError:  # a second call in place is refused for reasons of its own
        return False


def _names(function: Any) -> list[str]:
    """Return the names of the nodes of autograd from one on, those of each node's inputs after."""
    if function is None:
        return []
    return [
        function.name(),
        *(name for following, _ in function.next_functions for name in _names(following)),
    ]


def _reachable(loss: torch.Tensor) -> set[object]:
    """Walk the autograd graph down from the loss; leaves are entered by their id."""
    reached: set[object] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        function = pending.pop()
        if function is None or function in reached:
            continue
        reached.add(function)
        variable = getattr(function, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        pending.extend(following for following, _ in function.next_functions)
    return reached
