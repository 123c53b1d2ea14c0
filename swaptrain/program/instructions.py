"""The instructions that a step consists of, and the objects they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from swaptrain.program.roles import Role, role_of

__all__ = ["Instruction", "Kind", "ObjectKey", "Of", "Operation", "Program"]


class Kind(StrEnum):
    """What an object is."""

    STATE = "state"
    """One array of a segment's state, `name`, or one `part` of it where it is updated in parts."""
    VALUE = "value"
    """A value of one micro-batch; `segment` is its producer."""
    GRADIENT = "gradient"
    """The gradient of a value after the readers down to `segment` have been summed."""
    ACCUMULATOR = "accumulator"
    """A segment's parameter gradients: float32 sums, or bfloat16 of a single micro-batch."""
    SHARED = "shared"
    """One array of a segment's weights that another rank owns, as it sent it: for one visit of a
    segment, in memory only."""
    SAVED = "saved"
    """What autograd saves in a segment's forward of one micro-batch, for its backward: scratch."""


class Of(StrEnum):
    """What a value or a gradient is of, beside its kind."""

    PLAIN = ""
    """The training graph's value `name`. Objects of other kinds have this too."""
    BUFFERS_BEFORE = "before"
    """Value: copy of the array of buffers `name` from before the micro-batch's forward."""
    PARAMETER = "parameter"
    """Gradient: part of that of the parameter `name`, which several segments read."""
    EVALUATION = "evaluation"
    """Value of an evaluation's graph."""


_PREFIXES = {Of.BUFFERS_BEFORE: "before.", Of.PARAMETER: "parameter."}


class ObjectKey(NamedTuple):
    """The identity of an object that memory and disk hold.

    Within a step a key means one content, except state, which updates change; the next step uses
    the same keys again after they were freed.
    """

    kind: Kind
    name: str
    segment: int
    micro_batch: int = -1
    part: int = -1
    """Of state; -1 means the whole array."""
    of: Of = Of.PLAIN

    @property
    def role(self) -> Role:
        """Of state."""
        return role_of(self.name)

    @property
    def label(self) -> str:
        """Name that no other object of its kind, segment and micro-batch has; files have it."""
        return _PREFIXES.get(self.of, "") + self.name

    def __str__(self) -> str:
        suffix = f"[{self.micro_batch}]" if self.micro_batch >= 0 else ""
        suffix += f" part {self.part}" if self.part >= 0 else ""
        return f"{self.kind}/{self.segment:03d}/{self.label}{suffix}"


class Operation(StrEnum):
    """What an instruction does."""

    LOAD = "load"
    """Brings one micro-batch."""
    FORWARD = "forward"
    TURN = "turn"
    """Forward and backward in one: for the segment where the step turns round."""
    BACKWARD = "backward"
    """Propagates gradients, through what the forward saved or else a recomputation."""
    NORMS = "norms"
    """Takes the norms of finished gradients that wait for the next step's update."""
    UPDATE = "update"
    """Steps the optimizer."""
    STORE = "store"
    """Writes state as it is, for a commit that was not planned."""
    SHARE = "share"
    """Brings all ranks the weights that a segment computes with, from those that own them."""
    COLLECT = "collect"
    """Brings the rank that owns a segment the sums of all ranks, and adds them in their order."""
    EVALUATE = "evaluate"
    """A forward without gradients in evaluation mode."""


@dataclass(frozen=True)
class Instruction:
    """One thing to do, with exactly what it reads and writes."""

    operation: Operation
    segment: int
    micro_batch: int = -1
    graph: int = 0
    """Of an evaluation: which of its graphs; batches of another size have one of their own."""
    part: int = 0
    """Of an update, which goes through a large segment's state in several."""
    goes_on: bool = False
    """Another part of the same update follows: what this one changed is not yet a version."""
    reads: tuple[ObjectKey, ...] = ()
    changes: tuple[ObjectKey, ...] = ()
    """Read and modified in place."""
    writes: tuple[ObjectKey, ...] = ()
    """Made fresh."""
    frees: tuple[ObjectKey, ...] = ()
    """Used for the last time, by this instruction."""

    @property
    def needs(self) -> Iterator[ObjectKey]:
        """What has to be there before it runs."""
        yield from self.reads
        yield from self.changes

    @property
    def touches(self) -> Iterator[ObjectKey]:
        """Everything that is in memory while it runs."""
        yield from self.reads
        yield from self.changes
        yield from self.writes

    @property
    def is_exchange(self) -> bool:
        """Whether all ranks do it together."""
        return self.operation in (Operation.SHARE, Operation.COLLECT)

    @property
    def new_state(self) -> list[ObjectKey]:
        """The state that is a new version after it, of what it changes."""
        state = [key for key in self.changes if key.kind is Kind.STATE]
        return [key for key in state if key.part >= 0] if self.goes_on else state

    def __str__(self) -> str:
        suffix = f", {self.micro_batch}" if self.micro_batch >= 0 else ""
        suffix += f", part {self.part}" if self.part or self.goes_on else ""
        return f"{self.operation}({self.segment}{suffix})"


Program = tuple[Instruction, ...]
