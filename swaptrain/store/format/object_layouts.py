"""The layout of every object of a run: where its tensors lie, in its slab and in its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from swaptrain.program.evaluation import EvaluationSpec
from swaptrain.program.instructions import Kind, ObjectKey, Of
from swaptrain.program.model import ModelSpec
from swaptrain.program.ranks import ALONE, Ranks
from swaptrain.program.roles import SCALE_ELEMENTS, Role, role_of
from swaptrain.program.state_arrays import (
    StateShapes,
    accumulator_tensors,
    frozen_arrays,
    segment_arrays,
)
from swaptrain.program.tensors import ITEMSIZE, TensorSpec
from swaptrain.store.format.layout import Alike, ArrayLayout, SegmentLayout, lay_out

__all__ = ["Layouts", "value_file"]


_MOST_PARTS = 16
"""Of a segment's update: each one costs an instruction, and less memory is not needed for it."""


@dataclass(frozen=True)
class Undivided:
    """What a segment that is updated in parts has in one piece."""

    arrays: frozenset[str]
    """Of those that only updates read."""
    parameters: frozenset[str]
    """Of which no divided array has anything: the first part updates them."""


class Layouts:
    """The layouts of a cut model's state, accumulators, values and gradients."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        compute_dtype: str,
        state_shapes: StateShapes,
        elementwise: Callable[[str], bool],
        chunk_bytes: int,
        micro_batches: int,
        evaluations: Sequence[EvaluationSpec] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        """Lay out what the arguments say; `elementwise` says whose update can be done in parts.

        `micro_batches` are those of a step, of all ranks together.
        """
        self.model, self.compute_dtype = model, compute_dtype
        self._evaluations = evaluations
        self.chunk_bytes = chunk_bytes
        self.parts: dict[int, int] = {}
        """By segment that is updated in several parts: in how many."""
        self.undivided: dict[int, Undivided] = {}
        """By such a segment: what is not divided of what its update changes."""
        self._per_part: dict[int, int] = {}
        """By such a segment: the chunks of a part; the last one may have fewer."""
        self._of_parts: dict[ObjectKey, ArrayLayout] = {}
        self.state: dict[int, SegmentLayout] = {}
        """By segment, of those that this rank owns; so is `frozen`."""
        self.frozen: dict[int, SegmentLayout] = {}
        self._elsewhere: dict[int, list[SegmentLayout]] = {}
        """By segment that another rank owns: its state, and what is frozen of it."""
        self.state_arrays: dict[int, Sequence[str]] = {}
        """By segment, whoever owns it: the names of the arrays that its update changes."""
        self.accumulators: dict[int, ArrayLayout] = {}
        self.saved: dict[int, ArrayLayout] = {}
        """By segment: what autograd saves in a forward, where that was measured."""
        for segment in model.segments:
            k = segment.index
            state = segment_arrays(model, segment, compute_dtype, state_shapes)
            frozen = frozen_arrays(model, segment, compute_dtype)
            self.state_arrays[k] = sorted(state)
            if not ranks.owns(k):
                self._elsewhere[k] = [self._segment(arrays) for arrays in (state, frozen)]
            else:
                if state:
                    self.state[k] = self._state(k, state, elementwise)
                if frozen:
                    self.frozen[k] = self._segment(frozen)
            gradients = accumulator_tensors(model, segment, micro_batches)
            if gradients:
                self.accumulators[k] = self._array("gradient", gradients)

    @cached_property
    def values(self) -> Mapping[str, ArrayLayout]:
        """By the name of their files: values that somebody reads, and buffers before a forward."""
        layouts = {
            value.name: self._array(value.name, [value.tensor])
            for value in self.model.values.values()
            if value.readers
        }
        for k, state in self.state.items():
            for array in state.arrays:
                if array.role is Role.BUFFERS:
                    key = ObjectKey(Kind.VALUE, array.name, k, of=Of.BUFFERS_BEFORE)
                    layouts[value_file(key)] = array
        return layouts

    @cached_property
    def evaluated(self) -> Mapping[str, ArrayLayout]:
        """By name: the values of an evaluation that somebody reads."""
        return {
            value.name: self._array(value.name, [value.tensor])
            for graph in self._evaluations
            for value in graph.values.values()
            if value.readers
        }

    @property
    def evaluated_batches(self) -> int:
        """How many batches an evaluation has."""
        return sum(graph.batches for graph in self._evaluations)

    @cached_property
    def gradients(self) -> Mapping[str, ArrayLayout]:
        """By label: values that get a gradient, and parameters that several segments read."""
        layouts = {
            value.name: self._array(value.name, [value.gradient_tensor])
            for value in self.model.values.values()
            if value.gradient and value.readers
        }
        for segment in self.model.segments:
            for name in segment.parameters:
                shared = self.model.owner[name] != segment.index
                if shared and self.model.parameters[name].trainable:
                    tensor = self.model.parameters[name].tensor.without_holes()
                    label = ObjectKey(Kind.GRADIENT, name, segment.index, of=Of.PARAMETER).label
                    layouts[label] = self._array(label, [tensor])
        return layouts

    def note_saved(self, segment: int, saved_bytes: int) -> None:
        """Take note of what autograd saves in a forward of the segment, in bytes."""
        tensor = TensorSpec("saved", (max(1, saved_bytes),), (1,), "uint8")
        self.saved[segment] = self._array("saved", [tensor])

    def forget_saved(self, segments: Iterable[int]) -> None:
        """Take back what was noted: these segments are not to save anything."""
        for segment in segments:
            self.saved.pop(segment, None)

    @property
    def updated(self) -> list[int]:
        """The segments whose state an update of this rank changes."""
        return list(self.state)

    def array(self, key: ObjectKey) -> ArrayLayout:
        """Return the layout of an object."""
        if key.kind is Kind.STATE:
            holder = self.frozen if key.role is Role.FROZEN else self.state
            whole = holder[key.segment].array(key.name)
            if key.part < 0:
                return whole
            if key not in self._of_parts:
                self._of_parts[key] = whole.part(*self.chunks_of(key))
            return self._of_parts[key]
        if key.kind is Kind.SHARED:
            layouts = self._elsewhere[key.segment]
            return next(a for layout in layouts for a in layout.arrays if a.name == key.name)
        if key.kind is Kind.ACCUMULATOR:
            return self.accumulators[key.segment]
        if key.kind is Kind.GRADIENT:
            return self.gradients[key.label]
        if key.kind is Kind.SAVED:
            return self.saved[key.segment]
        if key.of is Of.EVALUATION:
            return self.evaluated[key.name]
        return self.values[value_file(key)]

    def chunks_of(self, key: ObjectKey) -> tuple[int, int]:
        """Return the first chunk of a part of an array, and how many there are."""
        chunks, count = self.state[key.segment].array(key.name).chunks, self._per_part[key.segment]
        return key.part * count, min(count, chunks - key.part * count)

    def state_keys(self, segment: int, array: str) -> list[ObjectKey]:
        """Return the objects that an array of a segment's state, or a frozen one, consists of."""
        whole = self.undivided[segment].arrays if segment in self.parts else ()
        if segment not in self.parts or array in whole or not role_of(array).is_for_updates:
            return [ObjectKey(Kind.STATE, array, segment)]
        return [
            ObjectKey(Kind.STATE, array, segment, part=part) for part in range(self.parts[segment])
        ]

    def size_bytes(self, key: ObjectKey) -> int:
        """Return the bytes of an object's slab."""
        return self.array(key).nbytes

    def _state(
        self, k: int, arrays: Mapping[str, list[TensorSpec]], elementwise: Callable[[str], bool]
    ) -> SegmentLayout:
        """Lay out a segment's state; note the parts that its update can be done in.

        A part is the same elements of every array that is divided, and the optimizer treats each
        element by itself. Weights with holes are updated whole: there a part would be other
        elements than those of the rest.
        """
        rest = {name: tensors for name, tensors in arrays.items() if role_of(name).is_for_updates}
        weights = [
            tensor
            for name, tensors in arrays.items()
            if role_of(name) is Role.WEIGHTS
            for tensor in tensors
        ]
        divided = divided_arrays(rest, weights)
        if not divided or not all(t.is_dense and elementwise(t.name) for t in weights):
            return self._segment(arrays)
        widths = [ITEMSIZE[rest[name][0].dtype] for name in divided]
        alike = Alike(rest[divided[0]], max(widths))
        if len(divided) < len(rest):  # some tensors are coded, others are not
            # A part begins with the first of the elements that share a scale.
            alike = Alike(weights, max(widths), min(2, *widths), SCALE_ELEMENTS)
        layout = SegmentLayout(
            tuple(
                self._array(name, tensors, alike=alike if name in divided else None)
                for name, tensors in sorted(arrays.items())
            )
        )
        chunks = layout.array(divided[0]).chunks
        per_part = -(-chunks // _MOST_PARTS)
        if chunks > per_part:
            self._per_part[k], self.parts[k] = per_part, -(-chunks // per_part)
            in_parts = {tensor.name for name in divided for tensor in rest[name]}
            self.undivided[k] = Undivided(
                frozenset(rest.keys() - set(divided)),
                frozenset(tensor.name for tensor in weights) - in_parts,
            )
        return layout

    def _segment(self, arrays: Mapping[str, list[TensorSpec]]) -> SegmentLayout:
        return SegmentLayout(
            tuple(self._array(name, tensors) for name, tensors in sorted(arrays.items()))
        )

    def _array(
        self, name: str, tensors: Sequence[TensorSpec], *, alike: Alike | None = None
    ) -> ArrayLayout:
        return lay_out(
            name, tensors[0].dtype, tensors, chunk_limit_bytes=self.chunk_bytes, alike=alike
        )


def value_file(key: ObjectKey) -> str:
    """Return the name of the files of a value, or of the copy of an array of buffers."""
    return f"{key.label}.{key.segment}" if key.of is Of.BUFFERS_BEFORE else key.name


def divided_arrays(
    rest: Mapping[str, Sequence[TensorSpec]], weights: Sequence[TensorSpec]
) -> list[str]:
    """Return which of the arrays that only updates read can be divided: the same elements in each.

    All of them where they hold the same dense tensors. With coded state those that have every coded
    tensor, element by element; scales and the float32 state of small tensors stay whole.
    """
    names = sorted(rest)
    shapes = {
        tuple((t.name, t.extent) for t in rest[name] if t.extent == t.numel) for name in names
    }
    if len(shapes) == 1 and len(next(iter(shapes))) == len(rest[names[0]]):
        return names
    optimizers = [name for name in names if role_of(name) is Role.OPTIMIZER]
    coded = {t.name for name in optimizers for t in rest[name] if t.dtype != "float32"}
    elements = {tensor.name: tensor.numel for tensor in weights}
    by_element = [n for n in names if all(t.extent == elements[t.name] for t in rest[n])]
    scales = [
        name
        for name in names
        if all(t.extent == -(-elements[t.name] // SCALE_ELEMENTS) > 1 for t in rest[name])
    ]
    if not coded or len(by_element) + len(scales) < len(names):
        return []
    return [name for name in by_element if coded <= {tensor.name for tensor in rest[name]}]
