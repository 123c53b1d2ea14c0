"""Takes the checks out of a captured graph: into a graph of their own, or as checks in segments."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.checks.batch_checks import BatchChecks, Check
from swaptrain.capture.checks.operation import CHECK, check_computed, is_check, is_scalar
from swaptrain.capture.trace import Trace, is_random, may_write, resolve_attribute
from swaptrain.errors import CaptureError

__all__ = ["take_checks"]

_TORCH_SAYS = "Runtime assertion failed"
"""Of what torch makes of a check beside the model's own; without the model's message."""


def take_checks(
    captured: fx.GraphModule, trace: Trace, keys: Sequence[str]
) -> tuple[BatchChecks, bool]:
    """Remove from `captured` what only feeds assertions; also say whether anything was.

    What depends on constants alone is checked at once; what depends on the batch alone becomes
    `BatchChecks`; what depends on computed values stays, as a call of `check_computed`.
    """
    nodes = list(captured.graph.nodes)
    sinks = [node for node in nodes if is_check(node)]
    if not sinks:
        return BatchChecks(), False
    slices = _Slices(captured, trace)
    wanted: list[tuple[fx.Node, Check]] = []
    computed: list[str] = []
    numbers = any(node.target is CHECK and is_scalar(node.all_input_nodes[0]) for node in sinks)
    for sink in sinks:
        for condition, message in _conditions(captured, sink):
            if numbers and message.startswith(_TORCH_SAYS):
                continue  # the model's own check says the same in its words
            if not isinstance(condition, fx.Node):
                if not condition:
                    raise CaptureError(f"a check of the model fails on every batch: {message}")
            elif slices.of_batch(sink):
                wanted.append((condition, Check(message)))
            else:
                with captured.graph.inserting_before(sink):
                    stays = captured.graph.call_function(check_computed, (condition, message))
                slices.stands_for(stays, sink)
                computed.append(message)
    unique = dict.fromkeys(wanted)
    graph = slices.graph([node for node, _ in unique]) if unique else None
    for sink in sinks:
        captured.graph.erase_node(sink)
    slices.prune()
    checks = tuple(check for _, check in unique)
    return BatchChecks(graph, tuple(keys), checks, tuple(dict.fromkeys(computed))), True


def _conditions(captured: fx.GraphModule, sink: fx.Node) -> Iterator[tuple[object, str]]:
    """Yield the conditions of an assertion, nodes or values, each with its message."""
    number = sink.args[0]
    if not str(sink.target).startswith("aten.sym_constrain_range"):
        message = sink.args[1] if len(sink.args) > 1 else "the condition is false"
        yield number, str(message)
        return
    for name, compare, word in (("min", operator.ge, "least"), ("max", operator.le, "most")):
        limit = sink.kwargs.get(name)
        if limit is not None:
            with captured.graph.inserting_before(sink):
                condition = captured.graph.call_function(compare, (number, limit))
            yield condition, f"a number has to be at {word} {limit}"


class _Slices:
    """Parts of a graph that lead to a node."""

    def __init__(self, captured: fx.GraphModule, trace: Trace) -> None:
        self._captured, self._trace = captured, trace
        self._order = {node: i for i, node in enumerate(captured.graph.nodes)}
        self._writers: dict[int, list[fx.Node]] = {}
        for node, facts in trace.facts.items():
            for storage in facts.written:
                self._writers.setdefault(storage, []).append(node)
        self._known: dict[fx.Node, bool] = {}

    def of_batch(self, sink: fx.Node) -> bool:
        """Whether what the assertion reads depends on the batch and on constants alone."""
        return all(self._is_plain(part) for part in self._ancestors([sink]) if part is not sink)

    def stands_for(self, new: fx.Node, old: fx.Node) -> None:
        """Treat a new node as the one before which it was inserted."""
        self._order[new] = self._order[old]
        self._trace.facts[new] = self._trace.facts[old]

    def prune(self) -> None:
        """Erase what nothing else needs: numbers, and what was computed or written for them."""
        graph = self._captured.graph
        kept = self._ancestors(node for node in graph.nodes if self._has_effect(node))
        for node in reversed(list(graph.nodes)):
            if node not in kept:
                graph.erase_node(node)

    def _has_effect(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "output") or node.target is check_computed:
            return True
        facts = self._trace.facts.get(node)
        if node.op != "call_function" or facts is None or not may_write(node) or is_scalar(node):
            return False
        outside = ("placeholder", "get_attr")
        written = [self._trace.origin[storage].op for storage in facts.written]
        return not written or any(op in outside for op in written)

    def graph(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        """Return a graph from all placeholders to `outputs`."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        parts = self._ancestors(outputs)
        for node in self._captured.graph.nodes:
            if node.op == "placeholder" or node in parts:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in outputs))
        return fx.GraphModule(self._captured, graph)

    def _ancestors(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return `nodes`, all that they read, and what has written to that before."""
        found: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            pending.extend(node.all_input_nodes)
            facts = self._trace.facts.get(node)
            for storage in facts.touched if facts is not None else ():
                here = self._order[node]
                pending.extend(
                    writer
                    for writer in self._writers.get(storage, ())
                    if self._order[writer] < here
                )
        return found

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether a node's own result is a function of its inputs that do not change."""
        if node not in self._known:
            self._known[node] = self._judge(node)
        return self._known[node]

    def _judge(self, node: fx.Node) -> bool:
        facts = self._trace.facts.get(node)
        if facts is not None and any(
            self._trace.origin[storage].op == "get_attr" for storage in facts.written
        ):
            return False  # a buffer that a forward changes
        if node.op == "get_attr":
            value = resolve_attribute(self._captured, str(node.target))
            changes = facts is not None and any(s in self._writers for s in facts.touched)
            return not changes and not isinstance(value, torch.nn.Parameter | FakeTensor)
        return not is_random(node)
