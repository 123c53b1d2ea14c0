"""Takes the steps of the captured segments, in memory, through the Runner that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.compute.object_tensors import copy_into
from swaptrain.compute.runner import Operands, Runner
from swaptrain.planning.check_capture.draws import SameDraws
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Of, Operation, Program
from swaptrain.program.step import StepBuilder

__all__ = ["SegmentSteps"]


class SegmentSteps:
    """A forward and a backward of all segments on one micro-batch, step after step.

    Follows the program of a step, so that values, shared parameters and buffers take the ways that
    they take in training. `weights` are read and not changed; `buffers` are the mutated ones.
    """

    def __init__(
        self,
        captured: Captured,
        weights: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        *,
        seed: int,
        draws: bool,
    ) -> None:
        self._model, self._weights, self._batch = captured.model, weights, batch
        self._runner = Runner(captured, seed=seed, micro_batches=1)
        self._program, self._draws = _program(captured), draws
        self.buffers = {name: tensor.clone() for name, tensor in captured.buffers.items()}
        self._buffers_before: dict[int, dict[str, Tensor]] = {}
        """By segment: its buffers before its forward, which the recomputation starts from."""
        self._objects: dict[ObjectKey, Tensor] = {}
        self._number = 0

    def step(self, number: int, sink: Callable[[str, Tensor], None]) -> Tensor:
        """Return the loss; hand each parameter's gradient to `sink`, which must not keep it."""
        self._number = number
        loss: Tensor | None = None
        with SameDraws(number) if self._draws else nullcontext():
            for instruction in self._program:
                found = self._execute(instruction, sink)
                loss = loss if found is None else found
                for key in instruction.frees:
                    self._objects.pop(key, None)
        self._objects.clear()
        self._buffers_before.clear()
        assert loss is not None, "the last segment makes the loss"
        return loss

    def _execute(
        self, instruction: Instruction, sink: Callable[[str, Tensor], None]
    ) -> Tensor | None:
        match instruction.operation:
            case Operation.LOAD:
                for key in instruction.writes:
                    self._objects[key] = self._batch[key.name.removeprefix("batch.")].clone()
            case Operation.FORWARD:
                self._forward(instruction)
            case Operation.TURN | Operation.BACKWARD:
                return self._backward(instruction, sink)
        return None

    def _forward(self, instruction: Instruction) -> None:
        k = instruction.segment
        own = self._model.segment(k).buffers
        self._buffers_before[k] = {name: self.buffers[name].clone() for name in own}
        operands = self._operands(instruction, self.buffers)
        outputs = self._runner.forward(k, self._number, 0, operands)
        for key in instruction.writes:
            if key.kind is Kind.VALUE and key.of is not Of.BUFFERS_BEFORE:
                value = outputs[key.name]
                self._objects[key] = _stored(value, value.stride())

    def _backward(
        self, instruction: Instruction, sink: Callable[[str, Tensor], None]
    ) -> Tensor | None:
        k = instruction.segment
        outputs = self._model.segment(k).outputs
        turn = instruction.operation is Operation.TURN
        operands = self._operands(instruction, self.buffers if turn else self._buffers_before[k])
        gradients: dict[str, Tensor] = {}
        later: dict[str, Tensor] = {}
        for key in instruction.reads:
            if key.kind is Kind.GRADIENT:
                incoming = key.of is not Of.PARAMETER and key.name in outputs
                (gradients if incoming else later)[key.name] = self._objects[key]
        made = [key for key in instruction.writes if key.kind is Kind.GRADIENT]
        partial = {key.name: key for key in made if key.of is Of.PARAMETER}
        written = {key.name: key for key in made if key.of is not Of.PARAMETER}

        def deliver(name: str, gradient: Tensor) -> None:
            shared = partial.get(name)
            if shared is None:
                sink(name, self._after_hooks(name, gradient))
            else:  # an earlier segment adds its own and delivers the sum
                self._objects[shared] = gradient.clone()

        inputs, loss = self._runner.backward(
            k, self._number, 0, operands, gradients, later, deliver
        )
        for name, gradient in inputs.items():
            if name in written:
                spec = self._model.values[name].gradient_tensor
                if gradient is None:
                    shape, dtype = spec.shape, getattr(torch, spec.dtype)
                    gradient = torch.zeros(shape, dtype=dtype)
                self._objects[written[name]] = _stored(gradient, spec.stride)
        return loss

    def _after_hooks(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient of the one micro-batch as hooks after the addition leave it."""
        hooks = self._runner.hooks.get(name)
        if hooks is None or not hooks.accumulated:
            return gradient
        total = gradient.clone()
        hooks.run_accumulated(self._weights[name], total)
        return total

    def _operands(self, instruction: Instruction, buffers: Mapping[str, Tensor]) -> Operands:
        segment = self._model.segment(instruction.segment)
        values = {
            key.name: self._objects[key]
            for key in instruction.reads
            if key.kind is Kind.VALUE and key.of is not Of.BUFFERS_BEFORE
        }
        parameters = {name: self._weights[name] for name in segment.parameters}
        return Operands(parameters, buffers, values)


def _program(captured: Captured) -> Program:
    arrays = {segment.index: ["weights"] for segment in captured.model.segments}
    builder = StepBuilder(captured.model, "float32", arrays, micro_batches=1, deferred=False)
    return builder.step()


def _stored(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a copy with the given strides, as a slab would hold it."""
    copy = torch.empty_strided(tuple(tensor.shape), tuple(stride), dtype=tensor.dtype)
    copy_into(copy, tensor)
    return copy
