"""Exports a forward until it is known to compute the same every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.guards.forward import Forward, ForwardGuard, owner_of
from swaptrain.capture.guards.states import keep_loss_alone, write_back
from swaptrain.capture.guards.tied import refuse_parted_buffers
from swaptrain.capture.trace import Trace, has_effect, is_random, resolve_attribute
from swaptrain.errors import CaptureError

__all__ = ["repeatable_graph"]


def repeatable_graph(
    model: nn.Module,
    guard: ForwardGuard,
    export: Callable[[], fx.GraphModule],
    trace: Callable[[fx.GraphModule], Trace],
) -> fx.GraphModule:
    """Return the graph of a forward with the state that it assigns.

    A forward that leaves Python state behind is exported once more as it left it: what only a
    first forward sets is taken over, where the second computes the same. Raises CaptureError where
    it does not.
    """
    captured = export()
    plain = _as_buffers(model, guard.last.replaced)
    if plain:
        captured = export()
    first = guard.last
    nodes = dict(zip(first.tensors, keep_loss_alone(captured), strict=True))
    if first.again:
        first.restore()
        second = export()
        keep_loss_alone(second)
        _check_repeats(first, guard.last, _same(captured, second, first, nodes, trace))
        first.forget_added(model)
    _check_unread(captured, [name for name in first.replaced if name not in plain])
    states = {name: nodes[name] for name in first.assigned}
    if states:
        refuse_parted_buffers(model, first.assigned)
        write_back(captured, trace(captured), states, plain)
    captured.graph.eliminate_dead_code(has_effect)
    captured.recompile()
    return captured


def _as_buffers(model: nn.Module, replaced: Mapping[str, torch.Tensor]) -> list[str]:
    """Register the plain attributes that a forward assigns as buffers; return their names.

    Those that hold a computed tensor already, as a weight of `weight_norm`, are left: each forward
    sets them before it reads them, or the capture finds out.
    """
    names = []
    for name in replaced:
        owner, key = owner_of(model, name)
        value = vars(owner)[key]
        if isinstance(value, FakeTensor) or value.requires_grad:
            continue
        del vars(owner)[key]
        owner.register_buffer(key, value, persistent=False)
        names.append(name)
    return names


def _check_unread(captured: fx.GraphModule, names: list[str]) -> None:
    """Refuse where a forward reads the computed tensor that it replaces."""
    targets = {f"model.{name}": name for name in names}
    for node in captured.graph.nodes:
        name = targets.get(str(node.target)) if node.op == "get_attr" and node.users else None
        if name is not None:
            raise CaptureError(
                f"the forward reads {name}, which the constructor computed from parameters, and "
                "assigns it anew: register it as a buffer, detached"
            )


def _check_repeats(first: Forward, second: Forward, same: bool) -> None:
    changed = sorted(f"{path} ({values})" for path, values in second.changed.items())
    if changed:
        raise CaptureError(
            f"the forward changes Python state: {', '.join(changed[:4])}. The captured graph would "
            "use one value for ever. Keep counters and averages in a registered buffer, and change "
            "it with tensor operations"
        )
    if second.added:
        raise CaptureError(
            f"each forward makes new tensors of the model: {', '.join(sorted(second.added))}; "
            "register them as buffers in the constructor"
        )
    if same:
        return
    names = sorted([*first.added, *first.kept, *first.changed])
    if names:
        raise CaptureError(
            f"a second forward computes something else than the first, which sets "
            f"{', '.join(names[:4])}: the captured graph would be that of one of them for ever. "
            "Register what goes on from forward to forward as a buffer, and compute in the "
            "constructor what is computed once"
        )
    raise CaptureError(
        f"what the forward computes depends on the time ({first.clock}): the captured graph would "
        "use one value for ever"
    )


def _same(
    one: fx.GraphModule,
    other: fx.GraphModule,
    first: Forward,
    nodes: Mapping[str, fx.Node],
    trace: Callable[[fx.GraphModule], Trace],
) -> bool:
    """Whether two graphs compute the same, up to what depends on constants alone.

    The other one may read tensors that the first made: those are constants where they were.
    """
    facts = trace(one)
    constant = _invariant(one, facts, lambda node, value: not isinstance(value, FakeTensor))
    known = {id(tensor): nodes[name] in constant for name, tensor in first.tensors.items()}
    by_target = {f"model.{name}": nodes[name] in constant for name in first.tensors}

    def is_constant(node: fx.Node, value: torch.Tensor) -> bool:
        if not isinstance(value, FakeTensor):
            return True
        return known.get(id(value), by_target.get(str(node.target), False))

    left = _lines(one, constant)
    right = _lines(other, _invariant(other, trace(other), is_constant))
    return left == right


def _invariant(
    graph: fx.GraphModule, trace: Trace, is_constant: Callable[[fx.Node, torch.Tensor], bool]
) -> set[fx.Node]:
    """Return the nodes that depend on no parameter, batch, draw or tensor that is written."""
    written = frozenset().union(*(facts.written for facts in trace.facts.values()))
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        facts = trace.facts.get(node)
        if facts is None or facts.touched & written or node.op == "placeholder":
            continue
        if node.op == "get_attr":
            value = resolve_attribute(graph, str(node.target))
            if isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor):
                continue
            if is_constant(node, value):
                found.add(node)
        elif not is_random(node) and all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _lines(graph: fx.GraphModule, constant: set[fx.Node]) -> list[str]:
    """Return the operations that depend on more than constants, and their arguments."""
    numbers: dict[fx.Node, str] = dict.fromkeys(constant, "constant")
    lines: list[str] = []
    for node in graph.graph.nodes:
        if node in constant:
            continue
        if node.op == "get_attr":
            value = resolve_attribute(graph, str(node.target))
            code = getattr(value, "code", None)
            numbers[node] = f"body {code}" if code is not None else f"attribute {node.target}"
            continue
        if node.op == "output":
            continue
        numbers[node] = f"%{len(lines)}"
        named: Any = lambda n: _Named(numbers[n])  # noqa: E731  # fx types it too narrowly
        arguments = fx.node.map_arg((node.args, node.kwargs), named)
        lines.append(f"{node.op} {node.target} {arguments}")
    return lines


class _Named:
    """Stands for a node inside of an argument tree."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name
