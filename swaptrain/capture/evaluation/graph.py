"""Captures `module.eval()` with its loss as a graph of its own, beside the one that is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from swaptrain.capture.checks.batch_checks import BatchChecks
from swaptrain.capture.checks.split import take_checks
from swaptrain.capture.constants import hoist_constants
from swaptrain.capture.evaluation.mode import eager_fast_paths, evaluating
from swaptrain.capture.evaluation.numbers import Numbers, add_numbers, loss_node
from swaptrain.capture.export import export_graph
from swaptrain.capture.forward.loss import scalars_of
from swaptrain.capture.inplace import replace_inplace
from swaptrain.capture.losses.terms import LossTerms, loss_terms
from swaptrain.capture.segments import Binding
from swaptrain.capture.trace import Trace, resolve_attribute, trace_graph
from swaptrain.capture.uncut import Uncut
from swaptrain.errors import CaptureError

__all__ = ["UncutEvaluation", "capture_evaluation"]


@dataclass(frozen=True)
class UncutEvaluation:
    """The graph of one batch size in evaluation mode, before it is cut."""

    captured: fx.GraphModule
    trace: Trace
    batch: Mapping[str, torch.Tensor]
    origins: Mapping[fx.Node, Binding]
    given: fx.Node
    """A vector in float64: the loss, and `numbers`."""
    numbers: Numbers
    batches: int
    """How many batches of this size one evaluation has."""
    losses: LossTerms
    """What its loss is the sum of."""
    checks: BatchChecks
    """What every batch of this size has to satisfy."""
    flagged: frozenset[str]
    """Parameters that require a gradient: some kernels look at the flag without a gradient too."""
    own_attributes: bool
    """Whether it reads plain tensor attributes of the model that training does not: no store holds
    what a constructor may have drawn for them."""


def capture_evaluation(
    module: nn.Module,
    fake_mode: FakeTensorMode,
    batch: Mapping[str, torch.Tensor],
    training: Uncut,
    *,
    batches: int,
) -> UncutEvaluation:
    """Export `module` in evaluation mode, without gradients, for batches shaped like `batch`.

    `training` is the same module's training graph: the buffers that it changes are state, which
    the evaluation reads. The module is left as it was. Raises CaptureError where torch.export does
    not accept the model in evaluation mode, where it returns no loss there, and where one batch
    would change the loss of the next.
    """

    def with_numbers(of: Callable[[object], Mapping[str, torch.Tensor]]) -> UncutEvaluation:
        names: list[str] = []

        def beside(result: object) -> Collection[torch.Tensor]:
            found = of(result)
            names[:] = found
            return found.values()

        with torch.no_grad(), evaluating(module), eager_fast_paths():
            captured = export_graph(module, fake_mode, batch, train=False, beside=beside)
        return _uncut(module, fake_mode, captured, names, batch, training, batches)

    try:
        return with_numbers(scalars_of)
    except CaptureError as error:
        with contextlib.suppress(CaptureError):  # the same one, or one of the loss
            found = with_numbers(lambda _: {})
            remark = f"what the forward returns beside its loss is not averaged: {error}"
            return replace(found, numbers=replace(found.numbers, remark=remark))
        items = len(next(iter(batch.values())))
        raise CaptureError(
            f"eval: the loss of {type(module).__name__} in evaluation mode (module.eval()), of a "
            f"batch of {items} items, cannot be had: {error}\n  without held-out losses "
            "(eval=null) the run trains"
        ) from error


def _uncut(
    module: nn.Module,
    fake_mode: FakeTensorMode,
    captured: fx.GraphModule,
    names: Sequence[str],
    batch: Mapping[str, torch.Tensor],
    training: Uncut,
    batches: int,
) -> UncutEvaluation:
    parameters = {id(parameter): name for name, parameter in module.named_parameters()}

    def traced() -> Trace:
        return trace_graph(captured, fake_mode, batch, gradients=False)

    trace = traced()
    checks, any_taken = take_checks(captured, trace, batch)
    if any_taken:
        checks.verify(batch, lambda: "the first batch of the held-out data")
        trace = traced()
    if _drop_dead(captured, trace):
        trace = traced()
    numbers = add_numbers(captured, trace, names)
    trace = traced()
    _check_writes(captured, trace, parameters)
    if replace_inplace(captured, trace):
        trace = traced()
    state = _state(captured, training)
    own_attributes = _reads_own_attributes(captured, module, training)
    if hoist_constants(captured, trace, state):
        trace = traced()
    output = next(node for node in captured.graph.nodes if node.op == "output")
    (given,) = output.all_input_nodes
    loss = loss_node(captured)
    if all(node.op != "call_function" for node in loss.all_input_nodes):
        raise CaptureError("it depends neither on the batch nor on a parameter there")
    return UncutEvaluation(
        captured=captured,
        trace=trace,
        batch=batch,
        origins=_origins(captured, parameters, state, list(batch)),
        given=given,
        numbers=numbers,
        batches=batches,
        losses=_losses(captured, trace, list(batch), state, loss),
        checks=checks,
        flagged=frozenset(name for name, p in module.named_parameters() if p.requires_grad),
        own_attributes=own_attributes,
    )


def _drop_dead(captured: fx.GraphModule, trace: Trace) -> bool:
    """Erase what the loss does not depend on, also by writes to memory; say if anything was.

    So a counter that every forward raises is no obstacle, as long as no forward reads it.
    """
    nodes = list(captured.graph.nodes)
    output = next(node for node in nodes if node.op == "output")
    live: set[fx.Node] = set()
    seen: set[int] = set()
    pending = [output]
    while pending:
        while pending:
            node = pending.pop()
            if node in live:
                continue
            live.add(node)
            pending.extend(node.all_input_nodes)
            seen |= trace.facts[node].touched if node in trace.facts else frozenset()
        pending = [node for node in nodes if node not in live and _writes(node, trace) & seen]
    dead = [node for node in nodes if node not in live and node.op != "placeholder"]
    for node in reversed(dead):
        captured.graph.erase_node(node)
    return bool(dead)


def _writes(node: fx.Node, trace: Trace) -> frozenset[int]:
    return trace.facts[node].written if node in trace.facts else frozenset()


def _check_writes(captured: fx.GraphModule, trace: Trace, parameters: Mapping[int, str]) -> None:
    """Raise CaptureError for a write to a parameter or buffer that the loss depends on."""
    for node in captured.graph.nodes:
        for storage in _writes(node, trace):
            origin = trace.origin[storage]
            if origin.op != "get_attr":
                continue
            tensor = resolve_attribute(captured, str(origin.target))
            name = parameters.get(id(tensor)) or str(origin.target).removeprefix("model.")
            raise CaptureError(
                f"the forward changes {name} and reads it there too, so that one batch would "
                "change the loss of the next: change it only `if self.training`"
            )


def _state(captured: fx.GraphModule, training: Uncut) -> dict[str, str]:
    """Return the names of buffers that training changes, by the attribute that fetches them.

    Raises CaptureError where the evaluation reads their memory through another tensor.
    """
    changed = {
        binding.name: resolve_attribute(training.captured, f"model.{binding.name}")
        for binding in training.origins.values()
        if binding.kind == "buffer"
    }
    storages = {_storage(tensor): name for name, tensor in changed.items()}
    found: dict[str, str] = {}
    for node in captured.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = resolve_attribute(captured, str(node.target))
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
            continue
        name = str(node.target).removeprefix("model.")
        same = next((n for n, other in changed.items() if other is tensor), name)
        if same in changed:
            found[str(node.target)] = same
        elif _storage(tensor) in storages:
            raise CaptureError(
                f"{name} is memory of the buffer {storages[_storage(tensor)]}, which training "
                "changes: read that buffer itself"
            )
    return found


def _losses(
    captured: fx.GraphModule,
    trace: Trace,
    keys: list[str],
    state: Mapping[str, str],
    loss: fx.Node,
) -> LossTerms:
    """Return the terms of the loss; of one that counts by what training changes, none."""
    losses = loss_terms(captured, trace, keys, loss)
    if losses.counter is not None and losses.counter.reads & state.keys():
        return LossTerms(reason="what it counts depends on buffers that training changes")
    return losses


def _reads_own_attributes(captured: fx.GraphModule, module: nn.Module, training: Uncut) -> bool:
    """Whether the graph fetches a tensor of the module that no state dict and no training has."""
    known = {*module.state_dict(), *dict(module.named_buffers())}
    known |= {binding.name.removeprefix("model.") for binding in training.origins.values()}
    for node in captured.graph.nodes:
        name = str(node.target).removeprefix("model.")
        path, _, attribute = name.rpartition(".")
        if node.op == "get_attr" and name not in known and name != str(node.target):
            owner = next((m for n, m in module.named_modules() if n == path), None)
            if owner is not None and hasattr(owner, attribute):  # a literal has no owner
                return True
    return False


def _origins(
    captured: fx.GraphModule,
    parameters: Mapping[int, str],
    state: Mapping[str, str],
    keys: list[str],
) -> dict[fx.Node, Binding]:
    """Say what every placeholder and fetched tensor of the graph stands for."""
    origins: dict[fx.Node, Binding] = {}
    batch = iter(keys)
    for node in captured.graph.nodes:
        target = str(node.target)
        if node.op == "placeholder":
            origins[node] = Binding("value", f"batch.{next(batch)}")
        elif node.op == "get_attr":
            tensor = resolve_attribute(captured, target)
            if isinstance(tensor, nn.Parameter):
                origins[node] = Binding("parameter", parameters[id(tensor)])
            elif target in state:
                origins[node] = Binding("buffer", state[target])
            elif isinstance(tensor, torch.Tensor):
                origins[node] = Binding("constant", target)
    return origins


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
