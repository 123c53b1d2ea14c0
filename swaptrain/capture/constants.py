"""What no micro-batch and no step changes (masks, rotary tables) is computed once and kept."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import xxhash
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.guards.hidden import fake_constant
from swaptrain.capture.trace import Trace, is_random, resolve_attribute

__all__ = ["hoist_constants"]

_MOST_BYTES = 64 << 20
_aten = torch.ops.aten
_UNDEFINED = frozenset(
    {
        _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
        _aten.empty_permuted.default, _aten.new_empty.default, _aten.new_empty_strided.default,
    }
)  # fmt: skip
"""What memory holds before it is written differs from run to run, and is no constant."""


def hoist_constants(captured: fx.GraphModule, trace: Trace, changing: Collection[str] = ()) -> bool:
    """Replace what depends on constants and unmutated buffers alone by its value; say if any was.

    Equal computations become one. The attributes `changing` are changed elsewhere: what depends on
    them stays. Nothing is done when the values would take more than 64 MiB, since they stay in
    memory for the whole run and count in its base.
    """
    invariant = _invariant_nodes(captured, trace, changing)
    wanted = [
        node
        for node in invariant
        if node.op == "call_function"
        and any(user not in invariant for user in node.users)
        and all(not tensor.requires_grad for tensor in trace.facts[node].tensors)
        and len(trace.facts[node].tensors) == 1
        and not isinstance(node.meta.get("val"), (tuple, list))
        and node.target not in _UNDEFINED
    ]
    total_bytes = sum(t.untyped_storage().nbytes() for n in wanted for t in trace.facts[n].tensors)
    if not wanted or total_bytes > _MOST_BYTES:
        return False
    values, same = _evaluate(captured, invariant)
    by_value: dict[object, fx.Node] = {}
    for node in wanted:
        shared = by_value.get(same[node])
        if shared is None:
            name = f"_constant_{node.name}"
            captured.register_buffer(name, values[node], persistent=False)
            with captured.graph.inserting_before(node):
                shared = captured.graph.get_attr(name)
            by_value[same[node]] = shared
        for user in list(node.users):
            if user not in invariant:
                user.replace_input_with(node, shared)
    for node in reversed(list(captured.graph.nodes)):
        if node in invariant and not node.users:
            captured.graph.erase_node(node)
    # The shared node stands where the first of its readers stood; later readers come after it.
    captured.graph.lint()
    return True


def _invariant_nodes(
    captured: fx.GraphModule, trace: Trace, changing: Collection[str]
) -> dict[fx.Node, None]:
    """Return, in order, the nodes that depend on no parameter, batch, draw or mutated storage."""
    written = {storage for facts in trace.facts.values() for storage in facts.written}
    invariant: dict[fx.Node, None] = {}
    for node in captured.graph.nodes:
        facts = trace.facts.get(node)
        if facts is None or facts.touched & written or node.op == "placeholder":
            continue
        if node.op == "get_attr":
            value = resolve_attribute(captured, str(node.target))
            if isinstance(value, torch.nn.Parameter) or str(node.target) in changing:
                continue
            if isinstance(value, FakeTensor):
                raise fake_constant(node)
            invariant[node] = None
        elif (
            node.op == "call_function"
            and not is_random(node)
            and all(argument in invariant for argument in node.all_input_nodes)
            and not any(t.requires_grad for t in facts.tensors)
        ):
            invariant[node] = None
    return invariant


def _evaluate(
    captured: fx.GraphModule, invariant: dict[fx.Node, None]
) -> tuple[dict[fx.Node, Any], dict[fx.Node, object]]:
    """Compute every invariant node for real; equal (operation, arguments) get equal keys."""
    values: dict[fx.Node, Any] = {}
    keys: dict[fx.Node, object] = {}
    for node in invariant:
        if node.op == "get_attr":
            values[node] = resolve_attribute(captured, str(node.target))
            keys[node] = node.target
            continue
        args = fx.node.map_arg(node.args, lambda n: values[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
        target: Any = node.target
        with torch.no_grad():
            values[node] = target(*args, **kwargs)
        replace: Any = lambda n: _Keyed(keys[n])  # noqa: E731  # fx types it too narrowly
        arguments = fx.node.map_arg((node.args, node.kwargs), replace)
        text = repr((str(target), arguments))
        keys[node] = xxhash.xxh3_128_hexdigest(text.encode())
    return values, keys


class _Keyed:
    """Stands for a node by its key inside an argument tree."""

    def __init__(self, key: object) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"<{self.key}>"
