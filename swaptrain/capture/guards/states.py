"""Buffers that a forward assigns: the graph writes the new tensors back into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from swaptrain.capture.trace import Trace, resolve_attribute
from swaptrain.errors import CaptureError

__all__ = ["keep_loss_alone", "write_back"]

_aten = torch.ops.aten


def keep_loss_alone(captured: fx.GraphModule) -> list[fx.Node]:
    """Leave only the loss of what the graph returns; return the nodes of the others."""
    output = _output(captured)
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    if len(results) == 1:
        return []
    loss, *others = results
    assert isinstance(loss, fx.Node)
    output.args = ((loss,),)
    return [node for node in others if isinstance(node, fx.Node)]


def write_back(
    captured: fx.GraphModule, trace: Trace, states: Mapping[str, fx.Node], plain: Sequence[str]
) -> None:
    """Make the graph copy each state's new tensor into its buffer.

    `states` gives, by a buffer's dotted name, the node of the tensor that it is assigned; those in
    `plain` are attributes that only become buffers where an earlier forward's tensor is read.
    The forward reads a copy that is made before the first read, so that what autograd saves of it
    stays. Raises CaptureError for what a copy cannot stand for.
    """
    order = {node: i for i, node in enumerate(captured.graph.nodes)}
    written = frozenset().union(*(facts.written for facts in trace.facts.values()))
    copies: dict[str, fx.Node] = {}
    pending: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    owners: dict[int, str] = {}
    for name, source in states.items():
        tensor = trace.facts[source].tensors[0]
        fetched = _fetched(captured, name)
        read = any(node.users for node in fetched)
        if not read and name in plain:
            continue
        _check_source(captured, trace, name, source, read=read)
        other = owners.setdefault(_storage(tensor), name)
        if other != name:
            raise CaptureError(
                f"the forward assigns tensors on one memory to {other} and {name}: give each a "
                "copy with .clone()"
            )
        buffer = fetched[0] if fetched else _fetch(captured, name)
        first = min(
            (u for node in fetched for u in node.users), key=order.__getitem__, default=None
        )
        if first is not None:
            copies[str(buffer.target)] = _read_a_copy(captured, fetched, first)
        pending.append((buffer, source, _last_writer(trace, source, order)))
    for buffer, source, last in pending:
        if source.op == "get_attr" and source is not buffer:
            source = _old_value(captured, source, copies, pending, trace, written)
            last = max((last, source), key=_position)
        # After the copy of what the buffer held, which others may read.
        last = max((last, copies.get(str(buffer.target), last)), key=_position)
        with captured.graph.inserting_after(last):
            detached = captured.graph.call_function(_aten.detach.default, (source,))
        with captured.graph.inserting_after(detached):
            captured.graph.call_function(_aten.copy_.default, (buffer, detached))
    captured.graph.lint()
    captured.recompile()


def _check_source(
    captured: fx.GraphModule, trace: Trace, name: str, source: fx.Node, *, read: bool
) -> None:
    tensor = trace.facts[source].tensors[0]
    buffer = resolve_attribute(captured, f"model.{name}")
    if (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
        raise CaptureError(
            f"the forward assigns a tensor of {tuple(tensor.shape)} {tensor.dtype} to {name}, "
            f"which has {tuple(buffer.shape)} {buffer.dtype}: state that goes on from forward to "
            "forward has to keep its shape and dtype"
        )
    if read and tensor.requires_grad:
        raise CaptureError(
            f"the forward assigns a tensor with a gradient to {name} and reads it in the next "
            "forward, whose backward would go through this one again: assign its .detach()"
        )
    origin = trace.origin[_storage(tensor)]
    if origin.op != "get_attr":
        return
    shown = resolve_attribute(captured, str(origin.target))
    if isinstance(shown, torch.nn.Parameter):
        raise CaptureError(
            f"the forward assigns the memory of the parameter "
            f"{str(origin.target).removeprefix('model.')} to {name}, which would follow its "
            "updates: assign a copy with .clone()"
        )


def _old_value(
    captured: fx.GraphModule,
    source: fx.Node,
    copies: dict[str, fx.Node],
    pending: Sequence[tuple[fx.Node, fx.Node, fx.Node]],
    trace: Trace,
    written: frozenset[int],
) -> fx.Node:
    """Return what holds a buffer's tensor from before the forward, which another one is assigned.

    As when two buffers change places: the first copy must not be what the second one reads.
    """
    target = str(source.target)
    if target in copies:
        return copies[target]
    if any(target == str(buffer.target) for buffer, _, _ in pending):
        with captured.graph.inserting_after(_last_input(source)):
            copies[target] = captured.graph.call_function(_aten.clone.default, (source,))
        return copies[target]
    if trace.facts[source].touched & written:
        raise CaptureError(
            f"the forward assigns the memory of {target.removeprefix('model.')}, which it changes, "
            "to another attribute: assign a copy with .clone()"
        )
    return source


def _position(node: fx.Node) -> int:
    return list(node.graph.nodes).index(node)


def _read_a_copy(captured: fx.GraphModule, fetched: list[fx.Node], first: fx.Node) -> fx.Node:
    with captured.graph.inserting_before(first):
        copy = captured.graph.call_function(_aten.clone.default, (fetched[0],))
    copy.meta["val"] = fetched[0].meta.get("val")
    for node in fetched:
        for user in list(node.users):
            if user is not copy:
                user.replace_input_with(node, copy)
    return copy


def _last_writer(trace: Trace, source: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node:
    """Return the last node that writes the memory of `source`, itself where none follows."""
    storage = _storage(trace.facts[source].tensors[0])
    last = source
    for node, facts in trace.facts.items():
        if storage in facts.written and order[node] > order[last]:
            last = node
    return last if last.op == "call_function" else _last_input(last)


def _last_input(node: fx.Node) -> fx.Node:
    """Return the last placeholder or fetched tensor: operations follow it."""
    found = node
    for other in node.graph.nodes:
        if other.op in ("placeholder", "get_attr"):
            found = other
    return found


def _fetched(captured: fx.GraphModule, name: str) -> list[fx.Node]:
    target = f"model.{name}"
    return [n for n in captured.graph.nodes if n.op == "get_attr" and n.target == target]


def _fetch(captured: fx.GraphModule, name: str) -> fx.Node:
    first = next(iter(captured.graph.nodes))
    with captured.graph.inserting_before(first):
        return captured.graph.get_attr(f"model.{name}")


def _output(captured: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(node for node in captured.graph.nodes if node.op == "output")
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
