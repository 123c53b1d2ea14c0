"""Where every object of a run lies in its slab and in its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.program.model import ModelSpec
from swaptrain.program.state import (
    StateShapes,
    accumulator_tensors,
    frozen_arrays,
    parameter_tensor,
    segment_arrays,
)
from swaptrain.program.tensors import TensorSpec
from swaptrain.store.layout import ArrayLayout, Entry, SegmentLayout, lay_out

__all__ = ["Layouts", "copy_into", "view", "views"]


class Layouts:
    """The layouts of a cut model's state, accumulators, values and gradients."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        compute_dtype: str,
        state_shapes: StateShapes,
        chunk_bytes: int,
        micro_batches: int,
    ) -> None:
        self.model, self.compute_dtype = model, compute_dtype
        self._chunk_bytes = chunk_bytes
        self.state: dict[int, SegmentLayout] = {}
        self.frozen: dict[int, SegmentLayout] = {}
        self.accumulators: dict[int, ArrayLayout] = {}
        self.saved: dict[int, ArrayLayout] = {}
        """By segment: what autograd saves in a forward, where that was measured."""
        for segment in model.segments:
            k = segment.index
            state = segment_arrays(model, segment, compute_dtype, state_shapes)
            if state:
                self.state[k] = self._segment(state)
            frozen = frozen_arrays(model, segment, compute_dtype)
            if frozen:
                self.frozen[k] = self._segment(frozen)
            gradients = accumulator_tensors(model, segment, micro_batches)
            if gradients:
                self.accumulators[k] = self._array("gradient", gradients)

    @cached_property
    def values(self) -> Mapping[str, ArrayLayout]:
        """By object name: values that somebody reads, and the buffers kept for recomputation."""
        layouts = {
            value.name: self._array(value.name, [value.tensor])
            for value in self.model.values.values()
            if value.readers
        }
        for k, state in self.state.items():
            for array in state.arrays:
                if array.name.startswith("buffers_"):
                    layouts[f"before.{array.name}.{k}"] = array
        return layouts

    @cached_property
    def gradients(self) -> Mapping[str, ArrayLayout]:
        """By object name: values that get a gradient, and parameters that several segments read."""
        layouts = {
            value.name: self._array(value.name, [value.gradient_tensor])
            for value in self.model.values.values()
            if value.gradient and value.readers
        }
        for segment in self.model.segments:
            for name in segment.parameters:
                shared = self.model.owner[name] != segment.index
                if shared and self.model.parameters[name].trainable:
                    tensor = self.model.parameters[name].tensor
                    layouts[parameter_tensor(name)] = self._array(parameter_tensor(name), [tensor])
        return layouts

    def note_saved(self, segment: int, saved_bytes: int) -> None:
        """Take note of what autograd saves in a forward of the segment, in bytes."""
        tensor = TensorSpec("saved", (max(1, saved_bytes),), (1,), "uint8")
        self.saved[segment] = self._array("saved", [tensor])

    def forget_saved(self, segments: Iterable[int]) -> None:
        """Take back what was noted: these segments are not to save anything."""
        for segment in segments:
            self.saved.pop(segment, None)

    @cached_property
    def state_arrays(self) -> dict[int, Sequence[str]]:
        """By segment: the names of the arrays that its update changes."""
        return {
            segment.index: [a.name for a in self.state[segment.index].arrays]
            if segment.index in self.state
            else []
            for segment in self.model.segments
        }

    def array(self, key: ObjectKey) -> ArrayLayout:
        """Return the layout of an object."""
        if key.kind is Kind.STATE:
            holder = self.frozen if key.name.startswith("frozen") else self.state
            return holder[key.segment].array(key.name)
        if key.kind is Kind.ACCUMULATOR:
            return self.accumulators[key.segment]
        if key.kind is Kind.GRADIENT:
            return self.gradients[key.name]
        if key.kind is Kind.SAVED:
            return self.saved[key.segment]
        if key.name.startswith("before."):
            return self.values[f"{key.name}.{key.segment}"]
        return self.values[key.name]

    def size_bytes(self, key: ObjectKey) -> int:
        """Return the bytes of an object's slab."""
        return self.array(key).nbytes

    def _segment(self, arrays: Mapping[str, list[TensorSpec]]) -> SegmentLayout:
        return SegmentLayout(
            tuple(self._array(name, tensors) for name, tensors in sorted(arrays.items()))
        )

    def _array(self, name: str, tensors: Sequence[TensorSpec]) -> ArrayLayout:
        return lay_out(name, tensors[0].dtype, tensors, chunk_limit_bytes=self._chunk_bytes)


def views(layout: ArrayLayout, slab: Slab) -> dict[str, Tensor]:
    """Return the tensors of an array by name, as views of its slab."""
    flat = slab.tensor(getattr(torch, layout.dtype), layout.length)
    return {entry.tensor.name: _strided(flat, entry) for entry in layout.entries}


def view(layout: ArrayLayout, slab: Slab) -> Tensor:
    """Return the only tensor of an array."""
    flat = slab.tensor(getattr(torch, layout.dtype), layout.length)
    return _strided(flat, layout.entries[0])


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a value into its slab, also where expanded dimensions share memory (stride 0)."""
    with torch.no_grad():
        for dimension, stride in enumerate(target.stride()):
            if stride == 0 and target.shape[dimension] > 1:
                target = target.narrow(dimension, 0, 1)
                source = source.narrow(dimension, 0, 1)
        target.copy_(source)


def _strided(flat: Tensor, entry: Entry) -> Tensor:
    return flat.as_strided(entry.tensor.shape, entry.tensor.stride, entry.offset)
