"""What is known of each class of segments: torch's own memory, seconds, what autograd saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from swaptrain.capture.captured import Captured
from swaptrain.program.instructions import Instruction, Kind, Operation

__all__ = ["Measured", "kind_of"]


@dataclass
class Measured:
    """What was seen of one instruction of each kind and class."""

    arena_bytes: int = 0
    """What torch takes beyond slabs, at the most."""
    saved_count: dict[int, int] = field(default_factory=dict)
    """By isomorphism class: the tensors that autograd saves in a forward."""
    seconds: dict[tuple[Operation, int, bool], float] = field(default_factory=dict)
    """By operation, isomorphism class, and whether autograd's tensors are saved for the backward:
    the median of several rounds."""
    decoding_s: dict[int, float] = field(default_factory=dict)
    """By isomorphism class: what a visit takes to decode weights, for all its micro-batches."""
    own_bytes: dict[tuple[Operation, int, bool], int] = field(default_factory=dict)
    """The most that torch takes for one such instruction where it finds no free block."""
    tier_s: float = 0.0
    """Seconds that the tier takes for an instruction, as an earlier start measured; 0: none did."""


def kind_of(captured: Captured, instruction: Instruction) -> tuple[Operation, int, bool]:
    """Return an instruction's operation, its class, and whether autograd's tensors are saved."""
    isomorphism = captured.computed_by(instruction).isomorphism
    saves = any(key.kind is Kind.SAVED for key in instruction.touches)
    return instruction.operation, isomorphism, saves
