"""Refuses the parameters whose steps would not be those of plain PyTorch, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from swaptrain.capture.trace import Trace
from swaptrain.errors import CaptureError
from swaptrain.program.model import ParameterSpec
from swaptrain.program.tensors import ITEMSIZE, TensorSpec

__all__ = ["check_gradients", "check_memory", "check_trained"]

_FLAGS = ("sparse", "sparse_grad")
"""Arguments of torch's operations that ask for a sparse gradient."""
_ADVICE = {
    "bfloat16": "set model.dtype to bfloat16, or build it in float32 (.float())",
    "float16": "set model.dtype to float16, or build it in float32 (.float())",
    "float64": "build it in float32 (.float())",
    "complex64": "train its real and imaginary part, a last dimension of 2, and use "
    "torch.view_as_complex in the forward",
}


def check_memory(name: str, parameter: torch.Tensor) -> None:
    """Raise CaptureError for a parameter that cannot be stored as numbers in memory of its own."""
    if parameter.is_quantized:
        raise CaptureError(
            f"parameter {name} is quantised ({parameter.dtype}): only plain numbers are stored. "
            "Build the model with its weights dequantised"
        )
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise CaptureError(
            f"parameter {name} has the dtype {dtype}, which cannot be stored: build it in float32, "
            "or in bfloat16 where it does not train"
        )
    if dtype == "complex128":
        raise CaptureError(
            f"parameter {name} is complex128, which no exported file can hold: build it as "
            "complex64 where it does not train; else train its real and imaginary part"
        )
    if parameter.is_conj() or parameter.is_neg():
        raise CaptureError(
            f"parameter {name} is a conjugated or negated view of memory: register a copy "
            "(.resolve_conj().resolve_neg().clone())"
        )
    if TensorSpec(name, tuple(parameter.shape), parameter.stride(), dtype).overlaps:
        raise CaptureError(
            f"parameter {name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}: "
            "several of its elements are one place in memory, which an optimizer cannot step. "
            "Register the tensor that it shows, and expand or unfold that in the forward"
        )


def check_trained(parameters: Iterable[ParameterSpec]) -> None:
    """Raise CaptureError for a parameter that trains in numbers without a float32 master."""
    for parameter in parameters:
        if parameter.trainable and parameter.master not in ("float32", "none"):
            advice = _ADVICE.get(parameter.master, _ADVICE["float64"])
            raise CaptureError(
                f"parameter {parameter.name} is {parameter.master} and trains: the weights that an "
                f"optimizer steps are float32. {advice[0].upper()}{advice[1:]}; or freeze it "
                "(requires_grad_(False))"
            )


def check_gradients(captured: fx.GraphModule, trace: Trace, parameters: Mapping[int, str]) -> None:
    """Raise CaptureError where an operation hands on a sparse gradient; parameters by `id`.

    Plain SGD and Adagrad pass over the rows that no micro-batch reads, AdamW refuses them, and all
    of swaptrain's gradients are dense.
    """
    for graph in (m for m in captured.modules() if isinstance(m, fx.GraphModule)):
        for node in graph.graph.nodes:
            if node.op != "call_function" or not _asks_for_sparse(node):
                continue
            source = node.args[0]
            facts = trace.facts.get(source) if isinstance(source, fx.Node) else None
            if facts is not None and not any(trace.gets_gradient(t) for t in facts.tensors):
                continue
            names = [parameters.get(id(t)) for t in facts.tensors] if facts else [None]
            what = f"parameter {names[0]}" if names[0] else f"what {node.name} reads"
            raise CaptureError(
                f"{what} would get a sparse gradient ({node.target}): swaptrain's gradients are "
                "dense. Build the layer with sparse=False, which trains the same with SGD without "
                "momentum and weight decay"
            )


def _asks_for_sparse(node: fx.Node) -> bool:
    """Whether an operation is called with one of the flags set."""
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    return any(given.get(flag) is True for flag in _FLAGS)
