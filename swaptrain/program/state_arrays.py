"""Which arrays a segment's state consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from swaptrain.program.model import ModelSpec, ParameterSpec, SegmentSpec
from swaptrain.program.quantized import codes_array, scales_array
from swaptrain.program.roles import Role, role_of
from swaptrain.program.tensors import TensorSpec, contiguous

__all__ = [
    "StateShapes",
    "accumulator_tensors",
    "array_of",
    "arrays_of",
    "frozen_arrays",
    "segment_arrays",
]

StateShapes = Callable[[TensorSpec], Mapping[str, tuple[tuple[int, ...], str]]]
"""From a parameter, by its tensor, to the names, shapes and dtypes of its optimizer state."""


def array_of(parameter: ParameterSpec, compute_dtype: str) -> str:
    """Return the name of the array that holds a parameter's weights.

    `weights` for the dtype that the model computes in, `weights_<dtype>` for others; parameters
    that are never updated are in `frozen` arrays, outside what a commit rewrites.
    """
    role = Role.WEIGHTS if parameter.trainable else Role.FROZEN
    dtype = parameter.tensor.dtype
    return role.value if dtype == compute_dtype else role.array(dtype)


def arrays_of(parameter: ParameterSpec, compute_dtype: str) -> tuple[str, ...]:
    """Return the names of the arrays that a forward needs of a parameter: codes and scales, or
    the one that holds its weights."""
    if parameter.quantized is None:
        return (array_of(parameter, compute_dtype),)
    return codes_array(parameter.quantized), scales_array(parameter.quantized)


def segment_arrays(
    model: ModelSpec, segment: SegmentSpec, compute_dtype: str, state_shapes: StateShapes
) -> dict[str, list[TensorSpec]]:
    """Return the tensors of each array that a commit of `segment` rewrites, in storage order.

    `weights`, `remainder` (the lower halves of split masters, or whole ones of float16), the
    optimizer's own arrays, and `buffers_<dtype>` for buffers that the forward mutates. A parameter
    whose memory has holes keeps them in its weights, which the forward reads; what only updates
    read has none.
    """
    arrays: dict[str, list[TensorSpec]] = {}
    for name in segment.owns:
        parameter = model.parameters[name]
        if not parameter.trainable:
            continue
        tensor = parameter.tensor
        arrays.setdefault(array_of(parameter, compute_dtype), []).append(tensor)
        if parameter.split:
            array, dtype = parameter.lower
            lower = replace(tensor.without_holes(), dtype=dtype)
            arrays.setdefault(array, []).append(lower)
        for state_name, (shape, dtype) in state_shapes(tensor).items():
            if role_of(state_name) is not Role.OPTIMIZER:
                raise ValueError(f"an optimizer's state cannot have the name {state_name}")
            own = tensor.without_holes().stride
            stride = own if shape == tensor.shape else contiguous(shape)
            arrays.setdefault(state_name, []).append(TensorSpec(name, shape, stride, dtype))
    for name in segment.buffers:
        tensor = model.buffers[name].tensor
        arrays.setdefault(Role.BUFFERS.array(tensor.dtype), []).append(tensor)
    return arrays


def frozen_arrays(
    model: ModelSpec, segment: SegmentSpec, compute_dtype: str
) -> dict[str, list[TensorSpec]]:
    """Return the arrays of parameters that are stored once and never rewritten."""
    arrays: dict[str, list[TensorSpec]] = {}
    for name in segment.owns:
        parameter = model.parameters[name]
        if not parameter.trainable:
            stored = zip(arrays_of(parameter, compute_dtype), parameter.stored, strict=True)
            for array, tensor in stored:
                arrays.setdefault(array, []).append(tensor)
    return arrays


def accumulator_tensors(
    model: ModelSpec, segment: SegmentSpec, micro_batches: int
) -> list[TensorSpec]:
    """Return the gradients of a segment's trainable parameters, laid out as autograd does it.

    That is as the parameters are, or row-major where those have holes.

    In float32, for the sum over `micro_batches`. There is nothing to add to a single one: then they
    stay as narrow as autograd makes them, and the update widens them, which changes no bit.
    """
    trained = [p for name in segment.owns if (p := model.parameters[name]).trainable]
    narrow = micro_batches == 1 and all(p.tensor.dtype == "bfloat16" for p in trained)
    tensors = [p.tensor.without_holes() for p in trained]
    return tensors if narrow else [replace(tensor, dtype="float32") for tensor in tensors]
