"""What the comparison takes, before it is made: memory and seconds."""

from __future__ import annotations

from swaptrain.capture.captured import Captured
from swaptrain.planning.planner import Plan
from swaptrain.program.instructions import Operation
from swaptrain.program.model import ModelSpec
from swaptrain.program.tensors import ITEMSIZE

__all__ = ["MOST_S", "flops_s", "needed_bytes", "needed_s"]

MOST_S = 60.0
"""What takes longer is compared with fewer layers, or not at all."""
_SLACK_BYTES = 24 << 20
_SLOW_FLOPS_PER_S = 2e10
"""Of a processor in float32, where a device computed what was measured."""
_FLOAT32_FACTOR = 4
"""Times as long that float32 takes on processors with units for bfloat16."""


def needed_bytes(captured: Captured, dtype: str) -> int:
    """Return the bytes that the comparison of a captured model takes in float32 at the most.

    Weights twice, the plain model's gradients, its buffers twice, and what it keeps for its
    backward, with the largest piece of it once more.
    """
    model = captured.model
    widening = 1 if dtype == "float32" else 2
    activations = [segment.activation_bytes * widening for segment in model.segments]
    buffers = [*captured.buffers.values(), *captured.constants.values()]
    return (
        _parameters_bytes(model)
        + sum(activations)
        + max(activations)
        + 2 * sum(tensor.nbytes for tensor in buffers)
        + _SLACK_BYTES
    )


def _parameters_bytes(model: ModelSpec) -> int:
    """Return the bytes of the weights twice and of the gradients of those that are trained."""
    return sum(
        (3 if parameter.trainable else 2) * parameter.tensor.numel * ITEMSIZE[parameter.widest]
        for parameter in model.parameters.values()
    )


def needed_s(plan: Plan, *, dtype: str, on_device: bool) -> float:
    """Return about how many seconds the steps of both take on the processor."""
    if on_device:
        return flops_s(plan.captured)
    segments, seconds = plan.captured.model.segments, plan.measured.seconds
    step_s = sum(
        seconds.get((operation, segment.isomorphism, False), 0.0)
        for segment in segments
        for operation in (Operation.FORWARD, Operation.BACKWARD, Operation.TURN)
    )
    return 4 * step_s * (1 if dtype == "float32" else _FLOAT32_FACTOR)


def flops_s(captured: Captured) -> float:
    """Return about how many seconds the steps take on a slow processor, from the products alone.

    A backward recomputes: four forwards of the segments and three of the plain model, twice.
    """
    return 2 * 7 * sum(segment.flops for segment in captured.model.segments) / _SLOW_FLOPS_PER_S
