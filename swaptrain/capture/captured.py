"""A captured model: cut, with the code of its segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swaptrain.capture.checks.batch_checks import BatchChecks
from swaptrain.capture.evaluation.slices import EvaluationGraph
from swaptrain.capture.guards.hooks import ParameterHooks
from swaptrain.capture.segments import Binding, Code
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.program.model import ModelSpec, SegmentSpec

__all__ = ["Captured"]


@dataclass(frozen=True)
class Captured:
    """A model ready to be planned, stored and run."""

    model: ModelSpec
    codes: tuple[Code, ...]
    """By isomorphism class."""
    bindings: tuple[tuple[Binding, ...], ...]
    """By segment (from index 0): what the placeholders of its code stand for."""
    random: tuple[tuple[str, ...], ...]
    """By segment: the names that key its random draws."""
    terms: tuple[tuple[int, ...], ...]
    """By segment: the counted terms of the loss that it computes."""
    constants: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    """Initial values of the mutated buffers."""
    hooks: Mapping[str, ParameterHooks]
    """What is called with the gradients of parameters, by name."""
    checks: BatchChecks
    """What every micro-batch has to satisfy before its forward."""
    evaluations: tuple[EvaluationGraph, ...] = ()
    """The graphs of an evaluation, one for each batch size; none without held-out data."""

    def computed_by(self, instruction: Instruction) -> SegmentSpec:
        """Return the segment, or the slice of an evaluation, that an instruction computes."""
        if instruction.operation is Operation.EVALUATE:
            return self.evaluations[instruction.graph].spec.slices[instruction.segment - 1]
        return self.model.segment(instruction.segment)
