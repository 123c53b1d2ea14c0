"""A module with fake parameters becomes one graph that ends in the loss."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import swaptrain
from swaptrain.capture.arguments import check_arguments
from swaptrain.capture.checks.operation import is_check
from swaptrain.capture.checks.record import recorded_checks
from swaptrain.capture.eager_branches import (
    eager_branches,
    inlined_checkpoints,
    refused_functions,
)
from swaptrain.capture.forward.loss import loss_of
from swaptrain.capture.guards.forward import ForwardGuard
from swaptrain.capture.guards.settled import settled_graph
from swaptrain.capture.trace import may_write, trace_graph
from swaptrain.errors import CaptureError

__all__ = ["export_graph"]

_NOT_THE_MODELS = (*(f"{Path(file).parent}/" for file in (torch.__file__, swaptrain.__file__)), "<")
"""How the names of files begin that are no part of a model."""
_DROPPED = (torch.ops.aten._assert_tensor_metadata.default,)


class _Loss(nn.Module):
    """Calls the model with one micro-batch and returns the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.guard = ForwardGuard(model)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        with self.guard.around():  # here, since torch.export puts attributes back
            result = self.model(**batch)
        loss = loss_of(result, self.model, batch.keys())
        outliving = self.guard.last.tensors.values()
        return (loss, *outliving) if outliving else loss


def export_graph(
    module: nn.Module,
    fake_mode: FakeTensorMode,
    batch: Mapping[str, torch.Tensor],
    *,
    train: bool = True,
) -> fx.GraphModule:
    """Return the training graph of `module` on batches shaped like `batch`.

    Without `train`, the graph of the mode that it is in.

    Parameters and buffers are `get_attr` nodes whose target is `model.<name>`, the tensors of the
    batch are placeholders `batch_<key>` in the order of `batch`, and the output is the loss.
    Raises CaptureError, naming module and operation, where torch.export does not accept the model.
    """
    check_arguments(module, batch)
    if train:
        module.train()
    wrapper = _Loss(module)
    return settled_graph(
        module,
        wrapper.guard,
        lambda: _graph(_any_export(wrapper, fake_mode, batch)),
        lambda graph: trace_graph(graph, fake_mode, batch, gradients=train),
    )


def _graph(program: torch.export.ExportedProgram) -> fx.GraphModule:
    captured = program.module()
    if not isinstance(captured, fx.GraphModule):  # torch's type is nn.Module
        raise CaptureError(f"torch.export returned {type(captured).__name__}, not a graph")
    _clean(captured)
    return captured


def _any_export(
    wrapper: _Loss, fake_mode: FakeTensorMode, batch: Mapping[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    """Export the branches of an eager run, or where torch refuses, those for exporting."""
    try:
        with eager_branches(batch):
            return _export(wrapper, fake_mode, batch)
    except CaptureError:
        raise
    except Exception:  # whatever torch raises: the model may know a branch for exporting
        try:
            return _export(wrapper, fake_mode, batch)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(_explain(error, wrapper.model)) from error


def _export(
    wrapper: nn.Module, fake_mode: FakeTensorMode, batch: Mapping[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        fake_mode,
        inlined_checkpoints(),
        refused_functions(),
        recorded_checks(),
        warnings.catch_warnings(),
        _silent(log),
        contextlib.redirect_stderr(io.StringIO()),  # torch prints the graph of what it refuses
    ):
        # The weights of recurrent layers are also in a plain list of the module.
        warnings.filterwarnings("ignore", "The tensor attributes? ", UserWarning)
        example = {key: fake_mode.from_tensor(value) for key, value in batch.items()}
        return torch.export.export(wrapper, (example,), strict=False)


@contextlib.contextmanager
def _silent(log: logging.Logger) -> Iterator[None]:
    """Keep torch from printing the traceback of an export that is tried in another way."""
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def _clean(captured: fx.GraphModule) -> None:
    """Drop input guards and metadata assertions: they are not part of the computation."""
    for node in list(captured.graph.nodes):
        if node.op == "call_module" or (node.op == "call_function" and node.target in _DROPPED):
            captured.graph.erase_node(node)
    captured.graph.eliminate_dead_code(is_impure_node=_is_impure)


def _is_impure(node: fx.Node) -> bool:
    """Keep whatever may write, and what only asserts something."""
    if node.op in ("placeholder", "output") or is_check(node):
        return True
    return node.op == "call_function" and may_write(node)


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
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        advice = (
            "the forward asks for a tensor's value while it is captured; replace .item(), "
            "`if tensor` and data-dependent shapes by tensor operations"
        )
    return (
        f"torch.export does not accept the model: {type(error).__name__}: {first}\n"
        f"  in {where}\n  what to do: {advice}"
    )


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
