"""What each node of a traced graph costs: bytes that live, bytes it adds, operations it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import fx

from swaptrain.capture.checks.operation import is_check
from swaptrain.capture.cut import GraphCosts
from swaptrain.capture.gradient_layout import overlaps
from swaptrain.capture.ranges.batch_operations import BATCH_RANGE
from swaptrain.capture.ranges.expert_operations import RANGE
from swaptrain.capture.ranges.expert_products import is_grouped
from swaptrain.capture.ranges.lookup_operations import LOOKUP
from swaptrain.capture.tokens.divided import DividedTokens
from swaptrain.capture.trace import Trace
from swaptrain.program.model import ParameterSpec

__all__ = ["graph_costs", "node_flops"]

_aten = torch.ops.aten


def graph_costs(
    captured: fx.GraphModule,
    trace: Trace,
    parameters: Mapping[str, ParameterSpec],
    first_reader: Mapping[str, fx.Node],
    state_bytes: Callable[[ParameterSpec], int],
    working_bytes: Callable[[ParameterSpec], int],
    uncuttable: frozenset[fx.Node] = frozenset(),
    divided: DividedTokens | None = None,
) -> GraphCosts:
    """Return the costs along the computing nodes, for the cut.

    What is `divided` stays together, and exists a range at a time.
    """
    nodes = [node for node in captured.graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(nodes)}
    state, working = [0] * len(nodes), [0] * len(nodes)
    for name, node in first_reader.items():
        if name in parameters:
            state[place[node]] += state_bytes(parameters[name])
            working[place[node]] += working_bytes(parameters[name])
    if divided is None:
        activation = list(map(trace.made_bytes, nodes))
    else:
        activation = [divided.at_once_bytes(node, trace) for node in nodes]
    spans = [] if divided is None else [(place[a], place[b]) for a, b in divided.spans()]
    return GraphCosts(
        live_bytes=_live_bytes(nodes, place, trace),
        legal=_legal_gaps(nodes, place, trace, captured, uncuttable, spans),
        state_bytes=state,
        working_bytes=working,
        activation_bytes=activation,
        kept=frozenset(_around_ranges(nodes)),
    )


def _around_ranges(nodes: list[fx.Node]) -> Iterator[int]:
    """Yield the gaps after each range of a parameter, and before the first one."""
    for i, node in enumerate(nodes):
        if node.target in (RANGE, BATCH_RANGE, LOOKUP):
            yield i
            if node.args[3] is None:
                yield i - 2 if node.args[1] is nodes[i - 1] else i - 1


def _live_bytes(nodes: list[fx.Node], place: Mapping[fx.Node, int], trace: Trace) -> list[int]:
    """Return for each node the bytes made up to it that later nodes read."""
    change = [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        last = max((place[user] for user in node.users if user in place), default=i)
        if last > i:
            size = sum(
                (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
                * t.element_size()
                for t in trace.facts[node].tensors
                if t.numel()
            )
            change[i] += size
            change[last] -= size
    live, total = [], 0
    for i in range(len(nodes)):
        total += change[i]
        live.append(total)
    return live


def _legal_gaps(
    nodes: list[fx.Node],
    place: Mapping[fx.Node, int],
    trace: Trace,
    captured: fx.GraphModule,
    uncuttable: frozenset[fx.Node],
    spans: Sequence[tuple[int, int]],
) -> list[bool]:
    """Forbid cuts where recomputation would see a write, and between a tuple and its parts.

    Nor inside of `spans`, or while a value is live that cannot be stored as it is: one of
    `uncuttable`, or one whose elements share memory otherwise than by expansion (`unfold`).

    For each activation storage that some operation writes: between the first node that touches it
    and the last that writes it. For each mutated buffer and written input: between its first and
    last user, so that it lies in one segment.
    """
    forbidden = [0] * (len(nodes) + 1)

    def forbid(first: int, last: int) -> None:
        if last > first:
            forbidden[first] += 1
            forbidden[last] -= 1

    for from_node, to_node in spans:
        forbid(from_node, to_node)
    touched: dict[int, list[int]] = {}
    written: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        facts = trace.facts[node]
        for storage in facts.touched:
            touched.setdefault(storage, []).append(i)
        for storage in facts.written:
            written.setdefault(storage, []).append(i)
        whole = (
            len(facts.tensors) != 1
            or node in uncuttable
            or isinstance(node.meta.get("val"), (tuple, list))
            or overlaps(facts.tensors[0].shape, facts.tensors[0].stride())
        )
        if whole:
            forbid(i, max((place[user] for user in node.users if user in place), default=i))
    for storage, writers in written.items():
        is_outside = trace.origin[storage].op in ("get_attr", "placeholder")
        forbid(touched[storage][0], touched[storage][-1] if is_outside else writers[-1])
    last = [
        max((place[user] for user in node.users if user in place), default=-1) for node in nodes
    ]
    for i, node in enumerate(nodes):
        if is_check(node):  # a segment has to make something that others read
            before = (j for j in range(i - 1, -1, -1) if last[j] > i)
            after = (j for j in range(i + 1, len(nodes)) if last[j] > j)
            first = next(before, None)
            forbid(0 if first is None else first, i if first is not None else next(after, i))
    output = next(node for node in captured.graph.nodes if node.op == "output")
    end = place.get(output.all_input_nodes[0], len(nodes))  # the loss ends the last segment
    legal, depth = [], 0
    for i in range(len(nodes)):
        depth += forbidden[i]
        legal.append(depth == 0 and i < end)
    return legal


def node_flops(node: fx.Node, trace: Trace) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention; else 0.

    Two per multiply-add, from the shapes; elementwise work is not counted. Of experts that a router
    chooses each counts as if it had as many rows as any other.
    """
    if node.op != "call_function" or not trace.facts[node].tensors:
        return 0
    out = trace.facts[node].tensors[0]

    def shape(i: int) -> tuple[int, ...]:
        argument = node.args[i]
        assert isinstance(argument, fx.Node)
        return tuple(trace.facts[argument].tensors[0].shape)

    target = node.target
    if is_grouped(target):
        return 2 * out.numel() * shape(0)[-1]
    if target is RANGE:
        bounds = node.args[2]
        assert isinstance(bounds, fx.Node) and isinstance(bounds.args[0], fx.Node)
        experts = trace.facts[bounds.args[0]].tensors[0].shape[0]
        return 2 * out.numel() * shape(0)[-1] * shape(1)[0] // experts
    if target is BATCH_RANGE:
        return 2 * shape(0)[1] * prod(shape(1))
    if target is _aten.linear.default:
        return 2 * out.numel() * shape(1)[-1]
    if target in (_aten.mm.default, _aten.bmm.default, _aten.matmul.default):
        return 2 * out.numel() * shape(0)[-1]
    if target in (_aten.addmm.default, _aten.baddbmm.default):
        return 2 * out.numel() * shape(1)[-1]
    if str(target).startswith(("aten.conv", "aten.convolution")):
        return 2 * out.numel() * prod(shape(1)[1:])
    if target is _aten.scaled_dot_product_attention.default:
        return 4 * out.numel() * shape(1)[-2]
    if target in (_aten.lstm.input, _aten.gru.input):
        weights = node.args[2]
        assert isinstance(weights, (list, tuple))
        sizes = [trace.facts[w].tensors[0] for w in weights if isinstance(w, fx.Node)]
        steps = prod(out.shape[:-1])
        return 2 * steps * sum(w.numel() for w in sizes if w.dim() == 2)
    return 0
