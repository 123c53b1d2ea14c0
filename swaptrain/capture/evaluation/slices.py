"""Cuts an evaluation graph so that a slice reads what one training segment reads.

The graph in evaluation mode has other operations than training's, so it has slices of its own,
contiguous in its own order. Where one operation, or what no cut may divide, reads the weights of
several segments (a fused encoder layer), its slice has all of them in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from swaptrain.capture.checks.batch_checks import BatchChecks
from swaptrain.capture.costs import graph_costs, node_flops
from swaptrain.capture.evaluation.graph import UncutEvaluation
from swaptrain.capture.evaluation.numbers import Numbers
from swaptrain.capture.losses.terms import LossTerms
from swaptrain.capture.segments import Binding, SegmentGraph, slice_graph
from swaptrain.capture.tokens.divided import DividedTokens, divide_tokens
from swaptrain.capture.trace import resolve_attribute
from swaptrain.program.evaluation import EvaluationSpec, value_prefix
from swaptrain.program.model import ModelSpec, ParameterSpec, SegmentSpec, ValueSpec
from swaptrain.program.tensors import TensorSpec

__all__ = ["EvaluationGraph", "slice_evaluations"]


@dataclass(frozen=True)
class EvaluationGraph:
    """What an evaluation of one batch size computes, slice by slice."""

    spec: EvaluationSpec
    codes: Mapping[int, fx.GraphModule]
    """By isomorphism class, numbered through all graphs of an evaluation."""
    bindings: tuple[tuple[Binding, ...], ...]
    """By slice (from index 0): what the placeholders of its code stand for."""
    random: tuple[tuple[str, ...], ...]
    """By slice: the names that key its random draws, where it draws in evaluation mode too."""
    terms: tuple[tuple[int, ...], ...]
    """By slice: the counted terms of the loss that it computes."""
    losses: LossTerms
    numbers: Numbers
    """What it gives beside the loss."""
    checks: BatchChecks
    constants: Mapping[str, torch.Tensor]
    flagged: frozenset[str]
    """Parameters that require a gradient."""


def slice_evaluations(
    uncut: Sequence[UncutEvaluation], model: ModelSpec, *, tokens: int | None = None
) -> tuple[EvaluationGraph, ...]:
    """Cut the graphs of an evaluation for the segments of `model`.

    With `tokens` what treats each token by itself is computed over ranges of so many.
    """
    graphs: list[EvaluationGraph] = []
    for number, each in enumerate(uncut):
        first_class = sum(len(graph.codes) for graph in graphs)
        graphs.append(_slice(each, model, number, first_class, tokens))
    return tuple(graphs)


def _slice(
    uncut: UncutEvaluation,
    model: ModelSpec,
    number: int,
    first_class: int,
    tokens: int | None,
) -> EvaluationGraph:
    prefix = value_prefix(number)
    divided = None if tokens is None else divide_tokens(uncut.captured, uncut.trace, tokens)
    cuts = _cuts(uncut, model, divided)
    found, codes = slice_graph(
        uncut.captured, uncut.trace, cuts, uncut.origins, uncut.given, uncut.losses, divided=divided
    )
    parts = [_named(part, prefix) for part in found]
    slices = tuple(
        _spec(part, uncut, index, first_class, prefix, divided)
        for index, part in enumerate(parts, 1)
    )
    constants = {
        binding.name: resolve_attribute(uncut.captured, binding.name)
        for part in parts
        for binding in part.bindings
        if binding.kind == "constant"
    }
    return EvaluationGraph(
        spec=EvaluationSpec(
            number=number,
            batches=uncut.batches,
            slices=slices,
            values=_values(uncut, parts, slices, prefix),
            given=f"{prefix}{uncut.given.name}",
        ),
        codes={first_class + i: code.train for i, code in enumerate(codes)},
        bindings=tuple(part.bindings for part in parts),
        random=tuple(tuple(f"{prefix}{name}" for name in part.random) for part in parts),
        terms=tuple(part.terms for part in parts),
        losses=uncut.losses,
        numbers=uncut.numbers,
        checks=uncut.checks,
        constants=constants,
        flagged=uncut.flagged,
    )


def _cuts(uncut: UncutEvaluation, model: ModelSpec, divided: DividedTokens | None) -> list[int]:
    """Return the computing nodes after which to cut, ascending.

    A slice grows as long as some training segment reads all the state that it reads. It ends at
    the legal gap with the fewest live bytes since its last reader of state.
    """
    nodes = [node for node in uncut.captured.graph.nodes if node.op == "call_function"]
    costs = graph_costs(uncut.captured, uncut.trace, {}, {}, _nothing, _nothing, divided=divided)
    readers = _readers(model)
    cuts: list[int] = []
    fitting: frozenset[int] | None = None
    last_reader = 0
    for i, node in enumerate(nodes):
        owners = _owners(node, uncut, model)
        if not owners:
            continue
        needed = frozenset.intersection(*(readers[owner] for owner in owners))
        both = needed if fitting is None else fitting & needed
        gaps = [gap for gap in range(last_reader, i) if costs.legal[gap]]
        if fitting is not None and not both and gaps:
            cuts.append(min(gaps, key=lambda gap: (costs.live_bytes[gap], -gap)))
            both = needed
        fitting, last_reader = both, i
    return cuts


def _readers(model: ModelSpec) -> Mapping[int, frozenset[int]]:
    """Return by segment which segments read state that it owns, itself included."""
    readers = {segment.index: {segment.index} for segment in model.segments}
    for segment in model.segments:
        for name in (*segment.parameters, *segment.buffers):
            readers[model.owner[name]].add(segment.index)
    return {owner: frozenset(found) for owner, found in readers.items()}


def _owners(node: fx.Node, uncut: UncutEvaluation, model: ModelSpec) -> set[int]:
    bindings = (uncut.origins.get(argument) for argument in node.all_input_nodes)
    return {
        model.owner[binding.name]
        for binding in bindings
        if binding is not None and binding.kind in ("parameter", "buffer")
    }


def _named(part: SegmentGraph, prefix: str) -> SegmentGraph:
    """Give the values that a slice reads their own names."""
    bindings = tuple(
        replace(b, name=f"{prefix}{b.name}") if b.kind == "value" else b for b in part.bindings
    )
    return replace(part, bindings=bindings)


def _spec(
    part: SegmentGraph,
    uncut: UncutEvaluation,
    index: int,
    first_class: int,
    prefix: str,
    divided: DividedTokens | None,
) -> SegmentSpec:
    trace = uncut.trace

    def names(kind: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b.name for b in part.bindings if b.kind == kind))

    return SegmentSpec(
        index=index,
        isomorphism=first_class + part.isomorphism,
        owns=(),
        parameters=names("parameter"),
        buffers=names("buffer"),
        inputs=names("value"),
        outputs=tuple(f"{prefix}{node.name}" for node in part.outputs),
        activation_bytes=sum(map(trace.made_bytes, part.nodes)),
        flops=sum(node_flops(node, trace) for node in part.nodes),
        module="-",
        divided_bytes=divided.saved_bytes(part.nodes, trace) if divided else 0,
    )


def _values(
    uncut: UncutEvaluation,
    parts: Sequence[SegmentGraph],
    slices: Sequence[SegmentSpec],
    prefix: str,
) -> dict[str, ValueSpec]:
    readers: dict[str, list[int]] = {}
    for part in slices:
        for name in part.inputs:
            readers.setdefault(name, []).append(part.index)

    def value(name: str, tensor: torch.Tensor, producer: int) -> ValueSpec:
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(name, tuple(tensor.shape), tuple(tensor.stride()), dtype)
        return ValueSpec(spec, producer, tuple(readers.get(name, ())), gradient=False)

    values = [value(f"{prefix}batch.{key}", tensor, 0) for key, tensor in uncut.batch.items()]
    for index, graph in enumerate(parts, start=1):
        for node in graph.outputs:
            (tensor,) = uncut.trace.facts[node].tensors
            values.append(value(f"{prefix}{node.name}", tensor, index))
    return {value.name: value for value in values}


def _nothing(_: ParameterSpec) -> int:
    return 0
