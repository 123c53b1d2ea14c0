"""A step as a list of instructions, in layer-major order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from swaptrain.program.evaluation import EvaluationSpec, evaluation
from swaptrain.program.forwards import forwards_left
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.model import ModelSpec, SegmentSpec
from swaptrain.program.objects import Objects
from swaptrain.program.ranks import ALONE, Ranks
from swaptrain.program.sharing import share

__all__ = ["StepBuilder"]


@dataclass(frozen=True)
class StepBuilder:
    """Turns a cut model into programs. A pure function of its fields and of the arguments."""

    model: ModelSpec
    compute_dtype: str
    state_arrays: Mapping[int, Sequence[str]]
    """By segment: the arrays that its update changes."""
    micro_batches: int
    """Of this rank."""
    deferred: bool
    """Updates wait for the global norm and run in the next step's forward."""
    parts: Mapping[int, int] = field(default_factory=dict)
    """By segment: in how many parts it is updated; 1 where it is not said."""
    undivided: Mapping[int, Collection[str]] = field(default_factory=dict)
    """By segment that is updated in parts: arrays that only updates read and that are whole."""
    saves: frozenset[int] = frozenset()
    """Segments whose forward saves for the backward what others recompute; not the last one, whose
    backward follows at once."""
    evaluations: tuple[EvaluationSpec, ...] = ()
    """The graphs of an evaluation, one for each batch size."""
    ranks: Ranks = ALONE
    """Which of several processes runs the programs."""

    @cached_property
    def objects(self) -> Objects:
        """What each instruction names."""
        return Objects(
            self.model,
            self.compute_dtype,
            self.state_arrays,
            self.parts,
            self.undivided,
            self.ranks,
        )

    def step(
        self,
        *,
        pending_updates: Sequence[int] = (),
        top: int | None = None,
        present: Collection[ObjectKey] = (),
    ) -> Program:
        """Return the program of one step.

        `pending_updates` are segments whose update of the step before is still to be done, before
        their forward. `top` resumes a step whose segments above `top` are done: the forward goes up
        to it only, and the backward starts with their hand-off. `present` are objects that an
        earlier process left on the disk, of those that `recoverable` names: forwards whose results
        are all there are left out. The backward passes over segments that do not learn; buffers
        that their forward changed are committed in their place. Of several ranks each computes its
        own micro-batches with all weights, and updates what it owns; SHARE and COLLECT come in the
        same order in the programs of all.
        """
        last = top if top is not None else len(self.model.segments)
        passing = self.model.segments[:last]
        forwards = forwards_left(
            self.objects,
            self.micro_batches,
            last,
            present=present,
            pending_updates=pending_updates,
        )
        program = [self._load(m) for m in range(self.micro_batches)]
        for segment in passing:
            if segment.index in pending_updates:
                program += self._update(segment)
            visit = [
                self._forward(segment, m)
                for m in range(self.micro_batches)
                if (segment.index, m) in forwards
            ]
            program += [*self._share(segment), *visit] if visit else []
        for segment in reversed(passing):
            learns = self.objects.learns(segment)
            program += self._share(segment) if learns else []
            for m in range(self.micro_batches if learns else 0):
                turn = segment.index == last
                saved = segment.index in self.saves and (segment.index, m) in forwards
                program.append(self._backward(segment, m, turn=turn, saved=saved))
            program += self._collect(segment) if learns else []
            if self.objects.has_state(segment):
                program += [self._norms(segment)] if self.deferred else self._update(segment)
        return self._with_frees(program, are_deferred=self.deferred)

    def flush(self, pending_updates: Sequence[int]) -> Program:
        """Return the program that does the updates that are still pending."""
        updates = (self._update(self.model.segment(k)) for k in sorted(pending_updates))
        return self._with_frees([*chain.from_iterable(updates)], are_deferred=False)

    def store(self) -> Program:
        """Return the program that writes all state, as it is, for a commit after any step."""
        return tuple(
            self._part(Operation.STORE, segment, part, keys)
            for segment in self.model.segments
            if self.objects.has_state(segment)
            for part, keys in enumerate(self.objects.state(segment))
        )

    def evaluation(self) -> Program:
        """Return a forward of each held-out batch without gradients.

        As many batches as a step has micro-batches pass the slices together; each rank computes
        its part of these.
        """
        program = evaluation(self.evaluations, self.objects, together=self.micro_batches)
        return self._with_frees(program, are_deferred=True)

    def _load(self, m: int) -> Instruction:
        return Instruction(Operation.LOAD, 0, m, writes=self.objects.batch(m))

    def _forward(self, segment: SegmentSpec, m: int) -> Instruction:
        return Instruction(
            Operation.FORWARD,
            segment.index,
            m,
            reads=(*self.objects.weights(segment), *self.objects.inputs(segment, m)),
            changes=self.objects.buffers(segment),
            writes=(
                *self.objects.outputs(segment, m),
                *(self.objects.buffers_before(segment, m) if self.objects.learns(segment) else ()),
                *(self.objects.saved(segment, m) if segment.index in self.saves else ()),
            ),
        )

    def _share(self, segment: SegmentSpec) -> list[Instruction]:
        found = share(segment, self.objects)
        return [] if found is None else [found]

    def _collect(self, segment: SegmentSpec) -> list[Instruction]:
        """Build what brings the sums of a segment together: its owner changes its own."""
        sums = self.objects.sums(segment)
        if self.ranks.count == 1 or not sums:
            return []
        if self.ranks.owns(segment.index):
            return [Instruction(Operation.COLLECT, segment.index, changes=sums)]
        return [Instruction(Operation.COLLECT, segment.index, reads=sums)]

    def _backward(self, segment: SegmentSpec, m: int, *, turn: bool, saved: bool) -> Instruction:
        """Build a backward; a turn runs the forward for good, so it changes buffers itself."""
        accumulator, first = self.objects.sums(segment), m == 0
        return Instruction(
            Operation.TURN if turn else Operation.BACKWARD,
            segment.index,
            m,
            reads=(
                *self.objects.weights(segment),
                *self.objects.inputs(segment, m),
                *(() if turn else self.objects.buffers_before(segment, m)),
                *(self.objects.saved(segment, m) if saved else ()),
                *self.objects.incoming(segment, m),
            ),
            changes=(
                *(self.objects.buffers(segment) if turn else ()),
                *(() if first else accumulator),
            ),
            writes=(*self.objects.outgoing(segment, m), *(accumulator if first else ())),
        )

    def _update(self, segment: SegmentSpec) -> list[Instruction]:
        # Clipping scales the sums in place, so no write of them may be under way.
        beside = (*self.objects.trained(segment), *self.objects.sums(segment))
        return [
            self._part(Operation.UPDATE, segment, part, (*keys, *beside))
            for part, keys in enumerate(self.objects.state(segment))
        ]

    def _part(
        self, operation: Operation, segment: SegmentSpec, part: int, keys: tuple[ObjectKey, ...]
    ) -> Instruction:
        goes_on = part + 1 < self.parts.get(segment.index, 1)
        changes = tuple(dict.fromkeys(keys))
        return Instruction(operation, segment.index, part=part, goes_on=goes_on, changes=changes)

    def _norms(self, segment: SegmentSpec) -> Instruction:
        return Instruction(
            Operation.NORMS,
            segment.index,
            reads=(*self.objects.sums(segment), *self.objects.buffers(segment)),
        )

    def _with_frees(self, program: Sequence[Instruction], *, are_deferred: bool) -> Program:
        """Mark at each object's last use that it is dead; state lives for ever.

        Accumulators outlive a step when the update is deferred to the next one, whose update frees
        them; those of segments that another rank owns end when that one has them.
        """
        done: list[Instruction] = []
        seen: set[ObjectKey] = set()
        for instruction in reversed(program):
            is_deferred = (
                are_deferred
                and instruction.operation is not Operation.UPDATE
                and self.ranks.owns(instruction.segment)
            )
            frees = tuple(
                key
                for key in dict.fromkeys(instruction.touches)
                if key.kind is not Kind.STATE
                and key not in seen
                and not (is_deferred and key.kind is Kind.ACCUMULATOR)
            )
            seen.update(instruction.touches)
            seen.difference_update(instruction.writes)  # before it, the name meant another object
            done.append(replace(instruction, frees=frees))
        return tuple(reversed(done))
