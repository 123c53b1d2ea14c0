"""What a training computes, symbolically: equal contents stand for equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Of, Operation
from swaptrain.program.model import ModelSpec

__all__ = ["Contents", "Ledger", "Memory"]


class Contents:
    """Gives equal terms equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

        self._terms: list[tuple[object, ...]] = []

    def of(self, *term: object) -> int:
        number = self._numbers.setdefault(term, len(self._numbers))
        if number == len(self._terms):
            self._terms.append(term)
        return number

    def term(self, number: int) -> tuple[object, ...]:
        """Return what a number stands for."""
        return self._terms[number]


@dataclass
class Ledger:
    """The losses and norms that a step has found so far."""

    losses: dict[int, int] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)

    def frozen(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[str, int], ...]]:
        return tuple(sorted(self.losses.items())), tuple(sorted(self.norms.items()))


@dataclass
class Memory:
    """The objects of one process, and what the instructions make of them."""

    model: ModelSpec
    contents: Contents
    objects: dict[ObjectKey, int]
    ledger: Ledger
    """Of the step that runs."""
    pending: Ledger
    """Of the step before, whose updates are pending."""

    def run(self, instruction: Instruction, step: int, update_step: int, *, clipped: bool) -> None:
        """Execute an instruction on symbols, as `compute.operations` does on tensors."""
        match instruction.operation:
            case Operation.LOAD:
                for key in instruction.writes:
                    self.objects[key] = self.contents.of("batch", key.name, step, key.micro_batch)
            case Operation.FORWARD:
                self._forward(instruction)
            case Operation.TURN | Operation.BACKWARD:
                self._backward(instruction)
            case Operation.NORMS:
                self._norms(instruction)
            case Operation.UPDATE:
                if not clipped:
                    self._norms(instruction)
                self._update(instruction, update_step, clipped=clipped)

    def _arguments(
        self, instruction: Instruction, buffers: Mapping[str, int]
    ) -> tuple[object, ...]:
        """Return what the forward of a micro-batch depends on."""
        read = [
            (key.name, key.segment, self.objects[key])
            for key in instruction.reads
            if (key.kind is Kind.STATE and not key.name.startswith("buffers_"))
            or (key.kind is Kind.VALUE and key.of is not Of.BUFFERS_BEFORE)
        ]
        return (instruction.segment, *read, *sorted(buffers.items()))

    def _forward(self, instruction: Instruction) -> tuple[object, ...]:
        buffers = {
            key.name: self.objects[key]
            for key in instruction.changes
            if key.kind is Kind.STATE and key.name.startswith("buffers_")
        }
        arguments = self._arguments(instruction, buffers)
        for key in instruction.writes:
            if key.kind is not Kind.VALUE:
                continue
            self.objects[key] = (
                buffers[key.name]
                if key.of is Of.BUFFERS_BEFORE
                else self.contents.of(key.name, *arguments)
            )
        for key in instruction.changes:
            if key.kind is Kind.STATE:
                self.objects[key] = self.contents.of("after", key.name, *arguments)
        return arguments

    def _backward(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.TURN:
            arguments = self._forward(instruction)
        else:
            before = {
                key.name: self.objects[key]
                for key in instruction.reads
                if key.of is Of.BUFFERS_BEFORE
            }
            arguments = self._arguments(instruction, before)
        incoming = tuple(
            (key.label, self.objects[key]) for key in instruction.reads if key.kind is Kind.GRADIENT
        )
        if self.model.values[self.model.loss].producer == instruction.segment:
            self.ledger.losses[instruction.micro_batch] = self.contents.of("loss", *arguments)
        for key in (*instruction.writes, *instruction.changes):
            if key.kind is Kind.GRADIENT:
                self.objects[key] = self.contents.of("gradient", key.label, *arguments, incoming)
            elif key.kind is Kind.ACCUMULATOR:
                so_far = self.objects[key] if key in instruction.changes else None
                self.objects[key] = self.contents.of("sum", so_far, *arguments, incoming)

    def _norms(self, instruction: Instruction) -> None:
        segment = self.model.segment(instruction.segment)
        sums = ObjectKey(Kind.ACCUMULATOR, "gradient", instruction.segment)
        for name in segment.owns:
            if self.model.parameters[name].trainable:
                self.ledger.norms[name] = self.contents.of("norm", name, self.objects[sums])

    def _update(self, instruction: Instruction, update_step: int, *, clipped: bool) -> None:
        sums = ObjectKey(Kind.ACCUMULATOR, "gradient", instruction.segment)
        coefficient = self.pending.frozen()[1] if clipped else None
        for key in instruction.changes:
            if key.kind is Kind.STATE and not key.name.startswith("buffers_"):
                self.objects[key] = self.contents.of(
                    "updated", key.name, self.objects[key], self.objects[sums], update_step,
                    coefficient,
                )  # fmt: skip
