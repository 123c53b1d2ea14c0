"""Frozen weights that are stored as codes and scales: how these lie, without torch."""

from __future__ import annotations

from math import prod
from typing import Literal, get_args

from swaptrain.program.roles import Role
from swaptrain.program.tensors import TensorSpec, contiguous

__all__ = ["NF4_BLOCK", "QuantizedAs", "codes_array", "is_scales", "quantized_tensors"]
__all__ += ["scales_array"]

QuantizedAs = Literal["int8", "nf4"]
"""int8: a byte a weight and a scale for each row (all dimensions but the last). nf4: half a byte a
weight and a scale for each 64, in row-major order."""
NF4_BLOCK = 64
"""Weights that share a scale."""


def codes_array(form: str) -> str:
    """Return the name of the array of codes."""
    return Role.FROZEN.array(f"{form}_codes")


def scales_array(form: str) -> str:
    """Return the name of the array of scales."""
    return Role.FROZEN.array(f"{form}_scales")


def is_scales(array: str) -> bool:
    """Whether an array is one of scales."""
    return array in {scales_array(form) for form in get_args(QuantizedAs)}


def quantized_tensors(weight: TensorSpec, form: QuantizedAs) -> dict[str, TensorSpec]:
    """Return by array the codes and the scales of a weight that lies in row-major order.

    int8: codes [*shape], scales [rows]; nf4: codes [ceil(n / 2)], two a byte, the first one in the
    upper half, and scales [ceil(n / 64)].
    """
    assert form in get_args(QuantizedAs) and weight.stride == contiguous(weight.shape)
    if form == "int8":
        codes, scales, dtype = weight.shape, prod(weight.shape[:-1]), "int8"
    else:
        codes, scales, dtype = (-(-weight.numel // 2),), -(-weight.numel // NF4_BLOCK), "uint8"
    return {
        codes_array(form): TensorSpec(weight.name, codes, contiguous(codes), dtype),
        scales_array(form): TensorSpec(weight.name, (scales,), (1,), "float32"),
    }
