"""What plain PyTorch takes for a job, and what this process may have."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from swaptrain.errors import ConfigError
from swaptrain.memory.limits import address_space_bytes, available_bytes, cgroup_limit
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.planning.planner import Plan
from swaptrain.program.roles import Role, role_of, state_of
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.units import format_size

__all__ = ["PlainNeed", "check_room", "plain_need"]

_SLACK_BYTES = 64 << 20
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class PlainNeed:
    """Bytes that plain PyTorch takes beside what this process has already."""

    weights: int
    """In 16 bits with a float32 copy of all of them."""
    gradients: int
    state: int
    """Of the optimizer, in float32 however a run stores it."""
    activations: int
    """Every tensor that a forward of one micro-batch computes: an upper bound."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.state + self.activations + _SLACK_BYTES

    def text(self) -> str:
        """Return it for a person."""
        parts = ", ".join(f"{format_size(size)} of {name}" for name, size in vars(self).items())
        return f"{format_size(self.total_bytes)} ({parts})"


def plain_need(plan: Plan) -> PlainNeed:
    """Return what the plain run of a captured model takes."""
    model = plan.captured.model
    weights = gradients = 0
    for parameter in model.parameters.values():
        numel, own_bytes = parameter.tensor.numel, ITEMSIZE[parameter.tensor.dtype]
        narrow = own_bytes < _FLOAT32_BYTES
        weights += numel * (own_bytes + _FLOAT32_BYTES * narrow)
        if parameter.trainable:
            gradients += numel * (own_bytes + _FLOAT32_BYTES * narrow)
    state = 0
    for layout in plan.layouts.state.values():
        for array in layout.arrays:
            if role_of(array.name) is Role.OPTIMIZER and state_of(array.name)[1] != "scale":
                state += sum(prod(entry.tensor.shape) for entry in array.entries) * _FLOAT32_BYTES
    activations = [segment.activation_bytes for segment in model.segments]
    return PlainNeed(weights, gradients, state, sum(activations) + max(activations))


def check_room(need: PlainNeed) -> None:
    """Raise ConfigError, with the figures, where the process may not have as much memory."""
    rooms = []
    free = available_bytes()
    if free is not None:
        rooms.append((free, "of RAM are free"))
    limit = cgroup_limit()
    if limit is not None:
        left = max(0, limit.limit_bytes - resident_bytes())
        rooms.append((left, f"are left of the control group's limit ({limit.path})"))
    addresses = address_space_bytes()
    if addresses is not None:
        rooms.append((max(0, addresses), "of addresses are left (ulimit -v)"))
    if not rooms:
        return
    room_bytes, what = min(rooms)
    if need.total_bytes > room_bytes:
        raise ConfigError(
            f"plain PyTorch would take {need.text()}, and {format_size(room_bytes)} {what}: "
            "compare a smaller model of the same kind (fewer layers), a smaller data.micro_batch "
            "or shorter sequences"
        )
