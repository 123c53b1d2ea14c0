"""From a module with fake parameters and one micro-batch to a cut model and its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from swaptrain.capture.captured import Captured
from swaptrain.capture.checks.split import take_checks
from swaptrain.capture.constants import hoist_constants
from swaptrain.capture.costs import graph_costs, node_flops
from swaptrain.capture.cut import CutLimits, choose_cuts
from swaptrain.capture.export import export_graph
from swaptrain.capture.fingerprint import cut_fingerprint
from swaptrain.capture.gradient_layout import gradient_strides
from swaptrain.capture.guards.hidden import refuse_hidden_state
from swaptrain.capture.guards.hooks import take_hooks
from swaptrain.capture.guards.shared import check_changing
from swaptrain.capture.guards.tied import name_tied_buffers
from swaptrain.capture.guards.trial import tried_hooks
from swaptrain.capture.inplace import replace_inplace
from swaptrain.capture.losses.terms import loss_terms
from swaptrain.capture.parameters.kinds import check_gradients, check_trained
from swaptrain.capture.segments import Binding, SegmentGraph, slice_graph
from swaptrain.capture.tokens.divided import DividedTokens, divide_tokens
from swaptrain.capture.trace import Trace, resolve_attribute, trace_graph
from swaptrain.capture.uncut import Uncut
from swaptrain.errors import CaptureError
from swaptrain.program.model import (
    BufferSpec,
    ModelSpec,
    ParameterSpec,
    SegmentSpec,
    ValueSpec,
)
from swaptrain.program.tensors import TensorSpec

__all__ = ["capture", "cut"]


def capture(
    module: nn.Module,
    fake_mode: FakeTensorMode,
    batch: Mapping[str, torch.Tensor],
    masters: Mapping[str, str],
) -> Uncut:
    """Export `module` (parameters fake, buffers real) and make it fit to be cut.

    `batch` is one micro-batch; `masters` gives the dtype of each parameter's master copy.
    """
    hooks = take_hooks(module)
    captured = export_graph(module, fake_mode, batch)
    name_tied_buffers(captured, module)
    trace = trace_graph(captured, fake_mode, batch)
    checks, any_taken = take_checks(captured, trace, batch)
    if any_taken:
        trace = trace_graph(captured, fake_mode, batch)
    if replace_inplace(captured, trace):
        trace = trace_graph(captured, fake_mode, batch)
    if hoist_constants(captured, trace):
        trace = trace_graph(captured, fake_mode, batch)
    parameters = {
        name: ParameterSpec(
            tensor=_tensor_spec(name, parameter),
            master=masters[name],
            trainable=trace.gets_gradient(parameter),
        )
        for name, parameter in module.named_parameters()
    }
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    check_trained(parameters.values())
    check_gradients(captured, trace, names)
    origins = _origins(captured, trace, names, list(batch))
    refuse_hidden_state(module, _changing(captured, origins))
    check_changing(_tensors(module, captured), _changing(captured, origins).values())
    tried = tried_hooks(hooks, dict(module.named_parameters()), _changing(captured, origins))
    output = next(node for node in captured.graph.nodes if node.op == "output")
    losses = loss_terms(captured, trace, list(batch), output.all_input_nodes[0])
    strides = gradient_strides(trace)
    return Uncut(captured, trace, batch, parameters, origins, strides, tried, losses, checks)


def _changing(captured: fx.GraphModule, origins: Mapping[fx.Node, Binding]) -> dict[int, str]:
    """Name the buffers that the forward changes by their storage."""
    return {
        int(resolve_attribute(captured, str(node.target)).untyped_storage()._cdata): binding.name
        for node, binding in origins.items()
        if binding.kind == "buffer"
    }


def _tensors(module: nn.Module, captured: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Return what the graph fetches and is no parameter, and all buffers, by name."""
    fetched = (str(node.target) for node in captured.graph.nodes if node.op == "get_attr")
    found = {n.removeprefix("model."): resolve_attribute(captured, n) for n in fetched}
    found.update(module.named_buffers())
    return {
        name: tensor
        for name, tensor in found.items()
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter)
    }


def cut(
    uncut: Uncut,
    limits: CutLimits,
    *,
    state_bytes: Callable[[ParameterSpec], int],
    working_bytes: Callable[[ParameterSpec], int],
    cuts: list[int] | None = None,
    skip_ignored: bool = False,
    tokens: int | None = None,
) -> tuple[Captured, list[int]]:
    """Cut a captured graph by `limits`, or at the recorded `cuts`; return it and the cuts.

    With `skip_ignored` the head computes no row that the loss ignores; with `tokens` what treats
    each token by itself is computed over ranges of so many.
    """
    captured, trace = uncut.captured, uncut.trace
    divided = None if tokens is None else divide_tokens(captured, trace, tokens)
    first_reader = _first_readers(uncut)
    if cuts is None:
        costs = graph_costs(
            captured, trace, uncut.parameters, first_reader,
            state_bytes, working_bytes, uncut.uncuttable, divided,
        )  # fmt: skip
        cuts = choose_cuts(costs, limits)
    loss = _loss_node(captured)
    graphs, codes = slice_graph(
        captured, trace, cuts, uncut.origins, loss, uncut.losses,
        skip_ignored=skip_ignored, divided=divided,
    )  # fmt: skip
    model = _model_spec(uncut, graphs, loss, cuts, divided)
    buffers = {
        name: resolve_attribute(captured, f"model.{name}").detach().clone()
        for name in model.buffers
    }
    constants = {
        binding.name: resolve_attribute(captured, binding.name)
        for graph in graphs
        for binding in graph.bindings
        if binding.kind == "constant"
    }
    result = Captured(
        model=model,
        codes=tuple(codes),
        bindings=tuple(graph.bindings for graph in graphs),
        random=tuple(graph.random for graph in graphs),
        terms=tuple(graph.terms for graph in graphs),
        constants=constants,
        buffers=buffers,
        hooks=uncut.hooks,
        checks=uncut.checks,
    )
    return result, cuts


def _origins(
    captured: fx.GraphModule, trace: Trace, names: Mapping[int, str], keys: list[str]
) -> dict[fx.Node, Binding]:
    """Say what every placeholder and fetched tensor of the graph stands for."""
    written = {storage for facts in trace.facts.values() for storage in facts.written}
    origins: dict[fx.Node, Binding] = {}
    batch = iter(keys)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            origins[node] = Binding("value", f"batch.{next(batch)}")
        elif node.op == "get_attr":
            tensor = resolve_attribute(captured, str(node.target))
            if not isinstance(tensor, torch.Tensor):
                continue
            mutated = bool(trace.facts[node].touched & written)
            if isinstance(tensor, nn.Parameter):
                if mutated:
                    raise CaptureError(
                        f"the forward writes to the parameter {names[id(tensor)]}: only buffers "
                        "may be changed by a forward"
                    )
                origins[node] = Binding("parameter", names[id(tensor)])
            elif mutated:
                origins[node] = Binding("buffer", str(node.target).removeprefix("model."))
            else:
                origins[node] = Binding("constant", str(node.target))
    return origins


def _first_readers(uncut: Uncut) -> dict[str, fx.Node]:
    """Return, for every parameter and mutated buffer that is read, the first computing node."""
    first: dict[str, fx.Node] = {}
    for node in uncut.captured.graph.nodes:
        if node.op == "call_function":
            for argument in node.all_input_nodes:
                binding = uncut.origins.get(argument)
                if binding is not None and binding.kind in ("parameter", "buffer"):
                    first.setdefault(binding.name, node)
    return first


def _loss_node(captured: fx.GraphModule) -> fx.Node:
    output: fx.Node = next(node for node in captured.graph.nodes if node.op == "output")
    return output.all_input_nodes[0]


def _tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _model_spec(
    uncut: Uncut,
    graphs: list[SegmentGraph],
    loss: fx.Node,
    cuts: list[int],
    divided: DividedTokens | None,
) -> ModelSpec:
    trace = uncut.trace
    owned: set[str] = set()
    segments: list[SegmentSpec] = []
    buffers: dict[str, BufferSpec] = {}
    for index, graph in enumerate(graphs, start=1):
        reads = [b.name for b in graph.bindings if b.kind == "parameter"]
        owns = [name for name in reads if name not in owned]
        if index == len(graphs):  # what nothing reads is kept by the last segment
            owns += [n for n in uncut.parameters if n not in owned and n not in owns]
        owned.update(owns)
        mutated = [b.name for b in graph.bindings if b.kind == "buffer"]
        for name in mutated:
            tensor = resolve_attribute(uncut.captured, f"model.{name}")
            buffers[name] = BufferSpec(_tensor_spec(name, tensor))
        segments.append(
            SegmentSpec(
                index=index,
                isomorphism=graph.isomorphism,
                owns=tuple(owns),
                parameters=tuple(reads),
                buffers=tuple(mutated),
                inputs=tuple(b.name for b in graph.bindings if b.kind == "value"),
                outputs=tuple(node.name for node in graph.outputs),
                activation_bytes=sum(map(trace.made_bytes, graph.nodes)),
                flops=sum(node_flops(node, trace) for node in graph.nodes),
                module=_module(owns),
                divided_bytes=divided.saved_bytes(graph.nodes, trace) if divided else 0,
            )
        )
    values = _values(uncut, graphs, segments)
    return ModelSpec(
        parameters=uncut.parameters,
        buffers=buffers,
        values=values,
        segments=tuple(segments),
        loss=loss.name,
        fingerprint=cut_fingerprint(uncut, cuts),
    )


def _values(
    uncut: Uncut, graphs: list[SegmentGraph], segments: list[SegmentSpec]
) -> dict[str, ValueSpec]:
    readers: dict[str, list[int]] = {}
    for segment in segments:
        for name in segment.inputs:
            readers.setdefault(name, []).append(segment.index)
    values = {
        f"batch.{key}": ValueSpec(
            _tensor_spec(f"batch.{key}", tensor), 0, tuple(readers.get(f"batch.{key}", ())), False
        )
        for key, tensor in uncut.batch.items()
    }
    for index, graph in enumerate(graphs, start=1):
        for node in graph.outputs:
            (tensor,) = uncut.trace.facts[node].tensors
            values[node.name] = ValueSpec(
                tensor=_tensor_spec(node.name, tensor),
                producer=index,
                readers=tuple(readers.get(node.name, ())),
                gradient=uncut.trace.gets_gradient(tensor),
                gradient_stride=uncut.gradient_strides.get(node),
            )
    return values


def _module(owns: list[str]) -> str:
    """Name a segment after the first and last module whose parameters it owns."""
    modules = list(dict.fromkeys(_short(name) for name in owns))
    if not modules:
        return "-"
    return modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]}"


def _short(name: str) -> str:
    """Cut a parameter's name after its layer number, or before its last part."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or name
