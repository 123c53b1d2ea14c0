"""Durability with one of its parts left out: a replay that finds nothing then proves nothing.

Without the barriers, the visits or the activations nothing is lost: a kill repeats more work. All
others are bytes that a resumed run cannot make again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from swaptrain.program.durability import Durability, Made
from swaptrain.program.instructions import Instruction, Kind, Operation, Program
from swaptrain.run.steps import executor

__all__ = ["WITHOUT", "leave_out"]


class _Changed(Durability):
    """The same, but for what `change` makes of what each instruction makes durable."""

    def __init__(
        self,
        program: Program,
        following: Program = (),
        *,
        change: Callable[[Instruction, Made], Made],
        **options: Any,
    ) -> None:
        super().__init__(program, following, **options)
        self._instructions, self._change = (*program, *following), change

    def made(self, position: int) -> Made:
        return self._change(self._instructions[position], super().made(position))


def _changed(change: Callable[[Instruction, Made], Made]) -> Callable[..., Durability]:
    return lambda program, following=(), **options: _Changed(
        program, following, change=change, **options
    )


def _without_barriers(*programs: Program, **options: Any) -> Durability:
    durability = Durability(*programs, **options)
    durability.barriers = frozenset()
    return durability


def _without_visits(*programs: Program, **options: Any) -> Durability:
    durability = Durability(*programs, **options)
    durability.visits = frozenset()
    return durability


def _without_activations(*programs: Program, **options: Any) -> Durability:
    return Durability(*programs, **{**options, "keeps_activations": False})


@_changed
def _without_handoff(instruction: Instruction, made: Made) -> Made:
    return replace(made, handed_on=(), alive=())


@_changed
def _without_an_array(instruction: Instruction, made: Made) -> Made:
    whole = instruction.operation is Operation.UPDATE and not instruction.goes_on
    return replace(made, objects=made.objects[1:]) if whole else made


@_changed
def _without_an_array_of_a_part(instruction: Instruction, made: Made) -> Made:
    goes_on = instruction.operation is Operation.UPDATE and instruction.goes_on
    return replace(made, objects=made.objects[1:]) if goes_on else made


@_changed
def _without_finished_gradients(instruction: Instruction, made: Made) -> Made:
    if instruction.operation is not Operation.NORMS:
        return made
    return replace(made, objects=tuple(k for k in made.objects if k.kind is Kind.STATE))


@_changed
def _without_buffers(instruction: Instruction, made: Made) -> Made:
    if instruction.operation is not Operation.NORMS:
        return made
    return replace(made, objects=tuple(k for k in made.objects if k.kind is not Kind.STATE))


WITHOUT: dict[str, Callable[..., Durability]] = {
    "barriers": _without_barriers,
    "visits": _without_visits,
    "activations": _without_activations,
    "hand-off": _without_handoff,
    "an array": _without_an_array,
    "an array of a part": _without_an_array_of_a_part,
    "finished gradients": _without_finished_gradients,
    "buffers": _without_buffers,
}
"""By what is left out: what makes the object, with the arguments of `Durability`."""


def leave_out(name: str) -> None:
    """Let the executor of this process be told by an object without that part."""
    executor.Durability = WITHOUT[name]  # type: ignore[assignment,misc]
