"""A step as a list of instructions, in layer-major order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.model import ModelSpec, SegmentSpec
from swaptrain.program.state import array_of, parameter_tensor

__all__ = ["StepBuilder"]


@dataclass(frozen=True)
class StepBuilder:
    """Turns a cut model into programs. A pure function of its fields and of the arguments."""

    model: ModelSpec
    compute_dtype: str
    state_arrays: Mapping[int, Sequence[str]]
    """By segment: the arrays that its update changes."""
    micro_batches: int
    wave: int
    """Micro-batches that pass a segment together; the step has ceil(micro_batches / wave) waves."""
    deferred: bool
    """Updates wait for the global norm and run in the next step's forward."""

    def step(
        self,
        *,
        pending_updates: Sequence[int] = (),
        top: int | None = None,
        from_micro_batch: int = 0,
    ) -> Program:
        """Return the program of one step.

        `pending_updates` are segments whose update of the step before is still to be done, before
        their forward. `top` resumes a fused step whose segments above `top` are committed: the
        forward goes up to it only, and the backward starts with their hand-off. Its wave begins
        with `from_micro_batch`; the sums of the micro-batches before it were kept.
        """
        waves = self._waves()
        if top is not None:
            waves = [range(from_micro_batch, self.micro_batches)]
        program: list[Instruction] = []
        last = top if top is not None else len(self.model.segments)
        accumulated = from_micro_batch > 0
        highest = max((s.index for s in self.model.segments if self._commits(s)), default=0)
        for number, wave in enumerate(waves):
            final = number == len(waves) - 1
            for m in wave:
                program.append(self._load(m))
            for segment in self.model.segments[:last]:
                if number == 0 and segment.index in pending_updates:
                    program.append(self._update(segment))
                if segment.index < last:
                    program += [self._forward(segment, m) for m in wave]
            for segment in reversed(self.model.segments[:last]):
                turn = segment.index == last
                for m in wave:
                    first = m == wave[0] and number == 0 and not accumulated
                    program.append(self._backward(segment, m, turn=turn, first=first))
                if final and self._commits(segment):
                    program.append(
                        self._settle(segment) if self.deferred else self._update(segment)
                    )
                elif (
                    number == len(waves) - 2
                    and not self.deferred
                    and segment.index < highest  # whose own commit is the first of the step
                    and self._commits(segment)
                ):
                    program.append(self._keep(segment, wave[-1]))
        return _with_frees(program, keep_accumulators=self.deferred)

    def flush(self, pending_updates: Sequence[int]) -> Program:
        """Return the program that does the updates that are still pending."""
        program = [self._update(self.model.segment(k)) for k in sorted(pending_updates)]
        return _with_frees(program, keep_accumulators=False)

    def store(self) -> Program:
        """Return the program that writes all state, as it is, for a commit behind any step."""
        return tuple(
            Instruction(Operation.STORE, segment.index, changes=self._state(segment))
            for segment in self.model.segments
            if self._commits(segment)
        )

    def evaluation(self, micro_batches: int) -> Program:
        """Return a forward of `micro_batches` micro-batches, wave by wave, without gradients."""
        program: list[Instruction] = []
        for first in range(0, micro_batches, self.wave):
            wave = range(first, min(first + self.wave, micro_batches))
            program += [self._load(m) for m in wave]
            for segment in self.model.segments:
                for m in wave:
                    program.append(
                        Instruction(
                            Operation.EVALUATE,
                            segment.index,
                            m,
                            reads=(
                                *self._weights(segment),
                                *self._buffers(segment),
                                *self._inputs(segment, m),
                            ),
                            writes=self._outputs(segment, m),
                        )
                    )
        return _with_frees(program, keep_accumulators=True)

    def _waves(self) -> list[range]:
        return [
            range(first, min(first + self.wave, self.micro_batches))
            for first in range(0, self.micro_batches, self.wave)
        ]

    def _load(self, m: int) -> Instruction:
        batch = tuple(
            ObjectKey(Kind.VALUE, value.name, 0, m)
            for value in self.model.values.values()
            if value.producer == 0 and value.readers
        )
        return Instruction(Operation.LOAD, 0, m, writes=batch)

    def _forward(self, segment: SegmentSpec, m: int) -> Instruction:
        return Instruction(
            Operation.FORWARD,
            segment.index,
            m,
            reads=(*self._weights(segment), *self._inputs(segment, m)),
            changes=self._buffers(segment),
            writes=(*self._outputs(segment, m), *self._snapshot(segment, m)),
        )

    def _backward(self, segment: SegmentSpec, m: int, *, turn: bool, first: bool) -> Instruction:
        """Build a backward; a turn runs the forward for good, so it changes buffers itself."""
        accumulator = self._sums(segment)
        return Instruction(
            Operation.TURN if turn else Operation.BACKWARD,
            segment.index,
            m,
            reads=(
                *self._weights(segment),
                *self._inputs(segment, m),
                *(() if turn else self._snapshot(segment, m)),
                *self._incoming(segment, m),
            ),
            changes=(
                *(self._buffers(segment) if turn else ()),
                *(() if first else accumulator),
            ),
            writes=(*self._outgoing(segment, m), *(accumulator if first else ())),
        )

    def _update(self, segment: SegmentSpec) -> Instruction:
        return Instruction(
            Operation.UPDATE,
            segment.index,
            changes=(
                *self._state(segment),
                *self._sums(segment),  # clipping scales them in place, so no write may be under way
            ),
        )

    def _settle(self, segment: SegmentSpec) -> Instruction:
        return Instruction(
            Operation.SETTLE,
            segment.index,
            reads=(*self._sums(segment), *self._buffers(segment)),
        )

    def _keep(self, segment: SegmentSpec, m: int) -> Instruction:
        """Build what keeps the sums up to micro-batch `m`, and the buffers as they are after it."""
        return Instruction(
            Operation.KEEP,
            segment.index,
            m,
            reads=(*self._sums(segment), *self._buffers(segment)),
        )

    def _commits(self, segment: SegmentSpec) -> bool:
        """Whether the segment has state: parameters that are trained, or buffers that change."""
        return bool(self.state_arrays[segment.index])

    def _state(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        k = segment.index
        return tuple(ObjectKey(Kind.STATE, name, k) for name in self.state_arrays[k])

    def _sums(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        """The accumulator, where the segment owns parameters that are trained."""
        if any(self.model.parameters[name].trainable for name in segment.owns):
            return (ObjectKey(Kind.ACCUMULATOR, "gradient", segment.index),)
        return ()

    def _weights(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        owner = self.model.owner
        keys = {
            ObjectKey(
                Kind.STATE,
                array_of(self.model.parameters[name], self.compute_dtype),
                owner[name],
            ): None
            for name in segment.parameters
        }
        return tuple(keys)

    def _buffers(self, segment: SegmentSpec) -> tuple[ObjectKey, ...]:
        keys = {
            ObjectKey(
                Kind.STATE, f"buffers_{self.model.buffers[name].tensor.dtype}", segment.index
            ): None
            for name in segment.buffers
        }
        return tuple(keys)

    def _snapshot(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """The buffers from before the micro-batch's forward: what its recomputation reads."""
        return tuple(
            ObjectKey(Kind.VALUE, f"before.{key.name}", segment.index, m)
            for key in self._buffers(segment)
        )

    def _inputs(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        return tuple(
            ObjectKey(Kind.VALUE, name, self.model.values[name].producer, m)
            for name in segment.inputs
        )

    def _outputs(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        """What others read of the segment's results; the loss is no object, only a number."""
        return tuple(
            ObjectKey(Kind.VALUE, name, segment.index, m)
            for name in segment.outputs
            if self.model.values[name].readers
        )

    def _incoming(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
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
                keys.append(ObjectKey(Kind.GRADIENT, parameter_tensor(name), later[0], m))
        return tuple(keys)

    def _outgoing(self, segment: SegmentSpec, m: int) -> tuple[ObjectKey, ...]:
        k = segment.index
        keys = [
            ObjectKey(Kind.GRADIENT, name, k, m)
            for name in segment.inputs
            if self.model.values[name].gradient
        ]
        keys += [
            ObjectKey(Kind.GRADIENT, parameter_tensor(name), k, m)
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


def _with_frees(program: Sequence[Instruction], *, keep_accumulators: bool) -> Program:
    """Mark at each object's last use that it is dead; state lives for ever.

    Accumulators outlive a step when the update is deferred to the next one, whose update frees
    them.
    """
    done: list[Instruction] = []
    seen: set[ObjectKey] = set()
    for instruction in reversed(program):
        kept = keep_accumulators and instruction.operation is not Operation.UPDATE
        frees = tuple(
            key
            for key in dict.fromkeys(instruction.touches)
            if key.kind is not Kind.STATE
            and key not in seen
            and not (kept and key.kind is Kind.ACCUMULATOR)
        )
        seen.update(instruction.touches)
        seen.difference_update(instruction.writes)  # before it, the name meant another object
        done.append(replace(instruction, frees=frees))
    return tuple(reversed(done))
