"""The role of an array in a segment's state: when it is read, and when it changes."""

from __future__ import annotations

from enum import Enum
from typing import Literal

__all__ = ["SCALE_ELEMENTS", "Role", "StateForm", "role_of", "state_array", "state_of"]

StateForm = Literal["", "8bit", "scale", "bf16"]
"""How a tensor of an optimizer's state is stored: as it is, as codes of 8 bits with their scales,
or as bfloat16."""
SCALE_ELEMENTS = 256
"""Elements of a state of 8 bits that share a scale, in the order of memory."""


class Role(Enum):
    """The value is the stem of the array's name: `weights`, `weights_float32`, `buffers_int64`."""

    WEIGHTS = "weights"
    """Trained parameters: the forward reads them, the update changes them."""
    FROZEN = "frozen"
    """Parameters that are stored once and never rewritten."""
    BUFFERS = "buffers"
    """Buffers that a forward mutates."""
    REMAINDER = "remainder"
    """Lower halves of split masters."""
    OPTIMIZER = ""
    """State of the optimizer, under its own name."""

    @property
    def is_for_updates(self) -> bool:
        """Whether it is of no use but for the update of its segment."""
        return self in (Role.REMAINDER, Role.OPTIMIZER)

    @property
    def begins_with_values(self) -> bool:
        """Whether the model says what it holds at first; an optimizer's state begins as zeros."""
        return self is not Role.OPTIMIZER

    def array(self, dtype: str) -> str:
        """Return the name of its array of a dtype."""
        return f"{self.value}_{dtype}"


def role_of(array: str) -> Role:
    """Return the role that the name of an array says.

    The only place that reads it from a name: on the disk there is nothing else, and names of
    optimizers' state are the optimizer's own.
    """
    return _BY_STEM.get(array.partition("_")[0], Role.OPTIMIZER)


def state_array(name: str, form: StateForm) -> str:
    """Return the name of the array that holds an optimizer's state tensor in a form."""
    return f"{name}_{form}" if form else name


def state_of(array: str) -> tuple[str, StateForm]:
    """Return which state tensor of the optimizer an array of that role holds, and in which form."""
    stem, _, end = array.rpartition("_")
    form: StateForm
    for form in ("8bit", "scale", "bf16"):
        if end == form and stem:
            return stem, form
    return array, ""


_BY_STEM = {role.value: role for role in Role if role is not Role.OPTIMIZER}
