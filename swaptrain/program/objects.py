"""The objects that the instructions of a segment name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from swaptrain.program.instructions import Kind, ObjectKey, Of
from swaptrain.program.model import ModelSpec, SegmentSpec
from swaptrain.program.ranks import ALONE, Ranks
from swaptrain.program.roles import Role, role_of
from swaptrain.program.state_arrays import arrays_of

__all__ = ["Objects"]


@dataclass(frozen=True)
class Objects:
    """What a cut model's segments read, change and make, for each micro-batch."""

    model: ModelSpec
    compute_dtype: str
    state_arrays: Mapping[int, Sequence[str]]
    """By segment: the arrays that its update changes."""
    parts: Mapping[int, int]
    """By segment: in how many parts it is updated; 1 where it is not said."""
    undivided: Mapping[int, Collection[str]] = field(default_factory=dict)
    """By segment that is updated in parts: arrays that only updates read and that are whole."""
    ranks: Ranks = ALONE
    """Which of several processes reads and changes them."""

    def batch(self, m: int) -> tuple[ObjectKey, ...]:
        """Return what a micro-batch brings."""
        return tuple(
            ObjectKey(Kind.VALUE, value.name, 0, m)
            for value in self.model.values.values()
            if value.producer == 0 and value.readers
        )

    def has_state(self, segment: SegmentSpec) -> bool:
        """Whether the segment has state, and this rank owns it."""
        return self.model.has_state(segment) and self.ranks.owns(segment.index)

    def learns(self, segment: SegmentSpec) -> bool:
        """Whether the segment has a backward: below it, or in it, something is trained."""
        return any(self.model.parameters[name].trainable for name in segment.parameters) or any(
            self.model.values[name].gradient for name in segment.inputs
        )

    def state(self, segment: SegmentSpec) -> list[tuple[ObjectKey, ...]]:
        """Return what is a new version after each part of its update.

        That is the part's piece of each array that only updates read, and after the last one the
        whole of the others, which computing needs in one piece.
        """
        k, parts = segment.index, self.parts.get(segment.index, 1)
        names = self.state_arrays[k]
        if parts == 1:
            return [tuple(ObjectKey(Kind.STATE, name, k) for name in names)]
        whole = self.undivided.get(k, ())
        rest = [name for name in names if role_of(name).is_for_updates and name not in whole]
        state = [
            tuple(ObjectKey(Kind.STATE, name, k, part=part) for name in rest)
            for part in range(parts)
        ]
        state[-1] += tuple(ObjectKey(Kind.STATE, n, k) for n in names if n not in rest)
        return state

    def trained(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        """Return what every part of its update changes: weights, and state that is not divided."""
        k = segment.index
        whole = self.undivided.get(k, ())
        names = (n for n in self.state_arrays[k] if role_of(n) is Role.WEIGHTS or n in whole)
        return tuple(ObjectKey(Kind.STATE, name, k) for name in names)

    def sums(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        """The accumulator, where the segment owns parameters that are trained."""
        if self.model.owns_trained(segment):
            return (ObjectKey(Kind.ACCUMULATOR, "gradient", segment.index),)
        return ()

    def weights(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        """Return the arrays of weights that it computes with, its own and shared ones.

        Of what another rank owns, as that one sends it.
        """
        owner = self.model.owner
        keys = {
            ObjectKey(self._kind(owner[name]), array, owner[name]): None
            for name in segment.parameters
            for array in arrays_of(self.model.parameters[name], self.compute_dtype)
        }
        return tuple(keys)

    def _kind(self, owner: int) -> Kind:
        return Kind.STATE if self.ranks.owns(owner) else Kind.SHARED

    def buffers(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        """Return the arrays of buffers that its forward mutates."""
        keys = {
            ObjectKey(
                Kind.STATE,
                Role.BUFFERS.array(self.model.buffers[name].tensor.dtype),
                segment.index,
            ): None
            for name in segment.buffers
        }
        return tuple(keys)

    def buffers_before(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """Copies of the buffers from before the micro-batch's forward, for its recomputation."""
        return tuple(
            ObjectKey(Kind.VALUE, key.name, segment.index, m, of=Of.BUFFERS_BEFORE)
            for key in self.buffers(segment)
        )

    def saved(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """What autograd saves in the micro-batch's forward."""
        return (ObjectKey(Kind.SAVED, "saved", segment.index, m),)

    def inputs(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """Return the values that it reads."""
        return tuple(
            ObjectKey(Kind.VALUE, name, self.model.values[name].producer, m)
            for name in segment.inputs
        )

    def outputs(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """What others read of the segment's results; the loss is no object, only a number."""
        return tuple(
            ObjectKey(Kind.VALUE, name, segment.index, m)
            for name in segment.outputs
            if self.model.values[name].readers
        )

    def incoming(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """Gradients that the backward starts from.

        Those of its outputs, and the sums that later readers made for its inputs and its shared
        parameters: extra roots, which reproduces autograd's own order of addition.
        """
        k = segment.index
        keys = [
            ObjectKey(Kind.GRADIENT, name, self.model.values[name].readers[0], m)
            for name in segment.outputs
            if self.model.values[name].gradient and self.model.values[name].readers
        ]
        for name in segment.inputs:
            later = [r for r in self.model.values[name].readers if r > k]
            if self.model.values[name].gradient and later:
                keys.append(ObjectKey(Kind.GRADIENT, name, later[0], m))
        for name in segment.parameters:
            later = [r for r in self._parameter_readers[name] if r > k]
            if self.model.parameters[name].trainable and later:
                keys.append(ObjectKey(Kind.GRADIENT, name, later[0], m, of=Of.PARAMETER))
        return tuple(keys)

    def outgoing(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """Return the gradients that its backward makes for segments below."""
        k = segment.index
        keys = [
            ObjectKey(Kind.GRADIENT, name, k, m)
            for name in segment.inputs
            if self.model.values[name].gradient
        ]
        keys += [
            ObjectKey(Kind.GRADIENT, name, k, m, of=Of.PARAMETER)
            for name in segment.parameters
            if self.model.parameters[name].trainable and self.model.owner[name] != k
        ]
        return tuple(keys)

    @cached_property
    def _parameter_readers(self) -> Mapping[str, list[int]]:
        readers: dict[str, list[int]] = {}
        for segment in self.model.segments:
            for name in segment.parameters:
                readers.setdefault(name, []).append(segment.index)
        return readers
