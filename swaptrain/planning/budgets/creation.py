"""What it takes to make the first weights of a run."""

from __future__ import annotations

from functools import cache

from swaptrain.models.initial_weights import InitialWeights
from swaptrain.program.quantized import is_scales
from swaptrain.program.tensors import contiguous
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["creation_bytes"]

_CODING_BYTES = 16 << 20
"""What it takes to code a weight, beside the weight and its codes."""


def creation_bytes(initial: InitialWeights, layouts: Layouts) -> int:
    """Return the most that is held while an array is filled with initial values."""
    parameters = layouts.model.parameters

    @cache
    def beside(name: str) -> int:
        if name not in parameters:
            return 0
        parameter = parameters[name]
        if parameter.quantized is not None:  # coded from the whole weight; scales wait
            return initial.block_bytes(name) + parameter.tensor.nbytes + _CODING_BYTES
        tensor = parameter.tensor
        if parameter.split and tensor.stride != contiguous(tensor.shape):
            return initial.value_bytes(name)
        return initial.block_bytes(name)

    def scales_bytes(layout: SegmentLayout) -> int:
        return sum(array.nbytes for array in layout.arrays if is_scales(array.name))

    return max(
        (
            array.nbytes
            + max((beside(e.tensor.name) for e in array.entries), default=0)
            + scales_bytes(segment)
            for segment in (*layouts.state.values(), *layouts.frozen.values())
            for array in segment.arrays
            if array.role.begins_with_values
        ),
        default=0,
    )
