"""In-place operations on activations become their out-of-place twins."""

from __future__ import annotations

import torch
from torch import fx

from swaptrain.capture.trace import NodeFacts, Trace

__all__ = ["replace_inplace"]

_NOTHING = NodeFacts((), frozenset(), frozenset())


def replace_inplace(captured: fx.GraphModule, trace: Trace) -> bool:
    """Rewrite `x.op_(...)` to `y = x.op(...)` where nothing else sees the write; say if any was.

    A write is seen by others when an alias of the storage, other than the operation's own input
    and result, is used after it. Those stay in place, and no cut is made across them. The bits are
    the same: the twin runs the same kernel into fresh memory.
    """
    order = {node: i for i, node in enumerate(captured.graph.nodes)}
    members: dict[int, list[fx.Node]] = {}
    for node, facts in trace.facts.items():
        for tensor in facts.tensors:
            members.setdefault(_key(tensor), []).append(node)
    changed = False
    for node in list(captured.graph.nodes):
        facts = trace.facts.get(node, _NOTHING)
        if facts.out_of_place is None or not facts.written:
            continue
        source = node.args[0]
        (storage,) = facts.written if len(facts.written) == 1 else (None,)
        if storage is None or trace.origin[storage].op in ("get_attr", "placeholder"):
            continue
        here = order[node]
        aliases = [other for other in members[storage] if other not in (source, node)]
        if any(
            order[user] > here for other in aliases if order[other] < here for user in other.users
        ):
            continue
        for user in list(source.users):
            if order[user] > here:
                user.replace_input_with(source, node)
        node.target = facts.out_of_place
        changed = True
    if changed:
        captured.graph.lint()
    return changed


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
