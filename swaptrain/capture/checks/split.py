"""Takes the checks out of a captured graph: into a graph of their own, or as checks in segments."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.checks.batch_checks import BatchChecks, OutputCheck, Requirement
from swaptrain.capture.checks.operation import CHECK, KNOWN, check_computed, is_check, is_scalar
from swaptrain.capture.trace import NodeFacts, Trace, is_random, may_write, resolve_attribute
from swaptrain.errors import CaptureError

__all__ = ["take_checks"]

_TORCH_SAYS = "Runtime assertion failed"
"""Of what torch makes of a check beside the model's own; without the model's message."""


_aten = torch.ops.aten
_CHOOSING = (_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.masked_select.default)
"""Of masks that they are given only the number of elements matters to the code that follows."""
_SUMMED: dict[object, Any] = {_aten.repeat_interleave.self_Tensor: _aten.sum.default}
"""What of an operation's numbers matters to the code that follows."""


def take_checks(
    captured: fx.GraphModule, trace: Trace, batch: Mapping[str, Tensor]
) -> tuple[BatchChecks, bool]:
    """Remove from `captured` what only feeds assertions; also say whether anything was.

    What depends on the batch alone, as the values and shapes that the model's code was told,
    becomes `BatchChecks`; what depends on computed values stays, as a call of `check_computed`.
    Raises CaptureError where `batch`, the first micro-batch, fails a check, and where a value was
    told that depends on a buffer which the forward changes.
    """
    sinks = [node for node in captured.graph.nodes if is_check(node)]
    if not sinks and not trace.answers:
        return BatchChecks(), False
    slices = _Slices(captured, trace)
    wanted: list[tuple[fx.Node, OutputCheck]] = []
    computed: list[str] = []
    for node in trace.answers:
        wanted += _answers(slices, node)
    numbers = any(node.target is CHECK and is_scalar(node.all_input_nodes[0]) for node in sinks)
    for sink in sinks:
        for condition, message in _conditions(captured, sink):
            if numbers and message.startswith(_TORCH_SAYS):
                continue  # the model's own check says the same in its words
            if not isinstance(condition, fx.Node):
                if not condition:
                    raise CaptureError(f"a check of the model fails on every batch: {message}")
            elif slices.of_batch(sink):
                wanted.append((condition, OutputCheck(Requirement.HOLDS, message)))
            else:
                slices.insert(sink, check_computed, (condition, message))
                computed.append(message)
    unique = list(dict.fromkeys(wanted))
    checks = BatchChecks(
        graph=slices.graph([node for node, _ in unique]) if unique else None,
        keys=tuple(batch),
        checks=tuple(check for _, check in unique),
        computed=tuple(dict.fromkeys(computed)),
    )
    for sink in sinks:
        captured.graph.erase_node(sink)
    slices.prune()
    name = _first_name
    checks = replace(checks, expected=tuple(checks.evaluate(batch, name)))
    checks.verify(batch, name)
    return checks, True


def _first_name() -> str:
    return "the first micro-batch of the data"


def _answers(slices: _Slices, node: fx.Node) -> Iterator[tuple[fx.Node, OutputCheck]]:
    """Yield what every micro-batch has to give as the first one did, for the code to be right."""
    if node.target is KNOWN:
        if not slices.of_batch(node):
            raise _changing(str(node.args[1]))
        given, where = node.all_input_nodes[0], str(node.args[1])
        yield given, OutputCheck(Requirement.VALUE, "what the model reads", where)
        return
    where = _line(node)
    if slices.of_batch(node):
        kind = Requirement.SHAPE if slices.tensors(node) else Requirement.VALUE
        yield node, OutputCheck(kind, f"the result of {node.target}", where)
        return
    # The question was about those inputs of an operation on computed values that are of the batch.
    inputs = [n for n in node.all_input_nodes if slices.tensors(n) and slices.of_batch(n)]
    if not inputs:
        raise _changing(where)
    for given in inputs:
        summed = _SUMMED.get(node.target)
        is_mask = slices.tensors(given)[0].dtype in (torch.bool, torch.uint8)
        if node.target in _CHOOSING and not is_mask:
            continue  # indices: as many elements as there are, whatever they are
        if node.target in _CHOOSING:
            summed = _aten.count_nonzero.default
        if summed is None:
            yield given, OutputCheck(Requirement.VALUE, f"what {node.target} reads", where)
            continue
        total = slices.insert(node, summed, (given,))
        elements = f"the number of elements that {node.target} makes"
        yield total, OutputCheck(Requirement.VALUE, elements, where)


def _changing(where: str) -> CaptureError:
    return CaptureError(
        f"the forward reads, in {where}, a value that depends on a buffer which the forward "
        "changes: the captured graph would hold its first value for ever. Keep such decisions out "
        "of the forward, or make them with tensor operations (torch.where)"
    )


def _line(node: fx.Node) -> str:
    """Return the line of the model's code that made a node."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    return "{}:{}, in {}".format(*found[-1]) if found else ""


def _conditions(captured: fx.GraphModule, sink: fx.Node) -> Iterator[tuple[object, str]]:
    """Yield the conditions of an assertion, nodes or values, each with its message."""
    if sink.target is KNOWN:
        return
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

    def tensors(self, node: fx.Node) -> tuple[Tensor, ...]:
        """Return what the node makes, as fake tensors."""
        facts = self._trace.facts.get(node)
        return () if facts is None else facts.tensors

    def insert(self, before: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """Insert a call that makes no tensors of its own."""
        with self._captured.graph.inserting_before(before):
            node = self._captured.graph.call_function(target, args)
        touched = frozenset().union(
            *(self._trace.facts[a].touched for a in node.all_input_nodes if a in self._trace.facts)
        )
        self._order[node] = self._order[before]
        self._trace.facts[node] = NodeFacts((), touched, frozenset())
        return node

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
