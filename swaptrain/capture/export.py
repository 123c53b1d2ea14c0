"""A module with fake parameters becomes one graph that ends in the loss."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import swaptrain
from swaptrain.capture.arguments import check_arguments
from swaptrain.capture.checks.batch_values import BatchValues
from swaptrain.capture.checks.operation import refuse_unknown_sizes
from swaptrain.capture.checks.questions import KnownInputs, answered_questions
from swaptrain.capture.checks.record import recorded_checks
from swaptrain.capture.eager_branches import (
    broadcast_masks,
    eager_branches,
    explicit_masks,
    inlined_checkpoints,
    refused_functions,
)
from swaptrain.capture.forward.loss import loss_of
from swaptrain.capture.guards.forward import ForwardGuard
from swaptrain.capture.guards.repeatable import repeatable_graph
from swaptrain.capture.trace import READS_VALUES, has_effect, trace_graph
from swaptrain.errors import CaptureError

__all__ = ["export_graph"]

_NOT_THE_MODELS = (*(f"{Path(file).parent}/" for file in (torch.__file__, swaptrain.__file__)), "<")
"""How the names of files begin that are no part of a model."""
_Beside = Callable[[object], Collection[torch.Tensor]]
_DROPPED = (torch.ops.aten._assert_tensor_metadata.default,)


class _Loss(nn.Module):
    """Calls the model with one micro-batch and returns the loss alone.

    With `beside`, in float64, [n]: the loss, and the numbers that this finds in what the model
    returned.
    """

    def __init__(self, model: nn.Module, beside: _Beside | None) -> None:
        super().__init__()
        self.model = model
        self.beside = beside
        self.guard = ForwardGuard(model)
        self.values: KnownInputs | None = None

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.values is not None:
            self.values.enter(self.model, batch)
        with self.guard.around():  # here, since torch.export puts attributes back
            result = self.model(**batch)
        loss = loss_of(result, self.model, batch.keys())
        if self.beside is not None:
            loss = torch.stack([value.double() for value in (loss, *self.beside(result))])
        outliving = self.guard.last.tensors.values()
        return (loss, *outliving) if outliving else loss


def export_graph(
    module: nn.Module,
    fake_mode: FakeTensorMode,
    batch: Mapping[str, torch.Tensor],
    *,
    train: bool = True,
    beside: _Beside | None = None,
) -> fx.GraphModule:
    """Return the training graph of `module` on batches shaped like `batch`.

    Without `train`, the graph of the mode that it is in. With `beside` it gives a vector: the loss
    and the numbers that this finds in what the model returned.

    Parameters and buffers are `get_attr` nodes whose target is `model.<name>`, the tensors of the
    batch are placeholders `batch_<key>` in the order of `batch`, and the output is the loss.
    Raises CaptureError, naming module and operation, where torch.export does not accept the model.
    """
    check_arguments(module, batch)
    if train:
        module.train()
    wrapper = _Loss(module, beside)
    return repeatable_graph(
        module,
        wrapper.guard,
        lambda: _graph(*_any_export(wrapper, fake_mode, batch)),
        lambda graph: trace_graph(graph, fake_mode, batch, gradients=train),
    )


def _graph(program: torch.export.ExportedProgram, valued: bool) -> fx.GraphModule:
    captured = program.module()
    if not isinstance(captured, fx.GraphModule):  # torch's type is nn.Module
        raise CaptureError(f"torch.export returned {type(captured).__name__}, not a graph")
    captured.meta[READS_VALUES] = valued
    _clean(captured)
    return captured


def _any_export(
    wrapper: _Loss, fake_mode: FakeTensorMode, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.export.ExportedProgram, bool]:
    """Export the branches of an eager run, or where torch refuses, those for exporting.

    Where both need values of the batch, they are answered with the first micro-batch's; also say
    whether they were.
    """
    first: Exception | None = None
    for eager, valued in ((True, False), (False, False), (True, True), (False, True)):
        branches = eager_branches(batch) if eager else contextlib.nullcontext()
        masks = explicit_masks() if valued else contextlib.nullcontext()
        try:
            with branches, masks:
                return _export(wrapper, fake_mode, batch, valued=valued), valued
        except CaptureError:
            raise
        except Exception as error:  # whatever torch raises: another way may do
            if eager == valued:  # the messages of export without values, and of eager with them
                first = error
    assert first is not None
    raise CaptureError(_explain(first, wrapper.model)) from first


def _export(
    wrapper: _Loss,
    fake_mode: FakeTensorMode,
    batch: Mapping[str, torch.Tensor],
    *,
    valued: bool,
) -> torch.export.ExportedProgram:
    names = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    values = BatchValues(fake_mode)
    wrapper.values = KnownInputs(values, wrapper.model, batch) if valued else None
    with (
        fake_mode,
        answered_questions(values) if valued else contextlib.nullcontext(),
        inlined_checkpoints(),
        broadcast_masks(),
        refused_functions(),
        recorded_checks(),
        warnings.catch_warnings(),
        _silent(*map(logging.getLogger, names)),
        contextlib.redirect_stderr(io.StringIO()),  # torch prints the graph of what it refuses
    ):
        # The weights of recurrent layers are also in a plain list of the module.
        warnings.filterwarnings("ignore", "The tensor attributes? ", UserWarning)
        example = {key: fake_mode.from_tensor(value) for key, value in batch.items()}
        program = torch.export.export(wrapper, (example,), strict=False)
    refuse_unknown_sizes(program.graph)
    return program


@contextlib.contextmanager
def _silent(*logs: logging.Logger) -> Iterator[None]:
    """Keep torch from printing the traceback of an export that is tried in another way."""
    disabled = [log.disabled for log in logs]
    try:
        for log in logs:
            log.disabled = True
        yield
    finally:
        for log, before in zip(logs, disabled, strict=True):
            log.disabled = before


def _clean(captured: fx.GraphModule) -> None:
    """Drop input guards and metadata assertions: they are not part of the computation."""
    for node in list(captured.graph.nodes):
        if node.op == "call_module" or (node.op == "call_function" and node.target in _DROPPED):
            captured.graph.erase_node(node)
    captured.graph.eliminate_dead_code(is_impure_node=has_effect)


def _explain(error: Exception, module: nn.Module) -> str:
    """Turn an export failure into: which module, which operation, what to do."""
    text = str(error)
    stack = [line.strip() for line in text.splitlines()]
    where = _innermost(error, module)
    first = next((line for line in stack if line), type(error).__name__)
    advice = (
        "see that it runs on such a micro-batch in plain PyTorch; if it does, make the forward "
        "free of data-dependent Python (.item(), if tensor: ...)"
    )
    if "_ctc_loss" in text:
        advice = (
            "torch's ctc_loss reads its lengths in Python while it is captured, so they have to "
            "follow from the batch alone: give them as keys of the items, or compute them from "
            "labels and masks, not from what a layer gives"
        )
    elif "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        advice = (
            "the forward asks for a tensor's value while it is captured; replace .item(), "
            "`if tensor` and data-dependent shapes by tensor operations"
        )
    elif isinstance(error, (AssertionError, Warning)) and (kept := _computed_attributes(module)):
        advice = (
            f"the tensor {', '.join(kept)} was computed from a parameter when the model was built, "
            "and a graph has no place for it: keep the parameter, and compute this in the forward"
        )
    return (
        f"torch.export does not accept the model: {type(error).__name__}: {first}\n"
        f"  in {where}\n  what to do: {advice}"
    )


def _computed_attributes(module: nn.Module) -> list[str]:
    """Return the attributes that hold a tensor with a history of gradients, by name."""
    return [
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf
    ]


def _innermost(error: Exception, module: nn.Module) -> str:
    """Name the submodule that raised, and the line of the model's own code, from the frames."""
    names = {id(submodule): path for path, submodule in module.named_modules()}
    found, line = f"module {type(module).__name__}", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            found = f"module {names[id(owner)] or 'the model itself'} ({type(owner).__name__})"
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_MODELS):
            line = f", {code.co_filename}:{number}, in {code.co_name}"
    return found + line
