"""Proves a program: nothing is read before it is written, nor after it is dead, in the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swaptrain.program.instructions import Kind, ObjectKey, Operation, Program

__all__ = ["Peaks", "ProgramError", "check_program"]


_COMPUTES = (Operation.FORWARD, Operation.TURN, Operation.BACKWARD)


class ProgramError(Exception):
    """A program breaks one of its rules; a bug in the builder, not in the user's input."""


@dataclass(frozen=True)
class Peaks:
    """The most that a program needs at once, in bytes."""

    instruction_bytes: int
    """The largest set of objects that one instruction needs in memory: the least pool."""
    largest: str
    """That instruction."""
    live_bytes: int
    """The most that values, gradients and accumulators take together, in memory or spilled."""


def check_program(
    program: Program,
    size_bytes: Callable[[ObjectKey], int],
    *,
    present: Iterable[ObjectKey] = (),
    forwarded: Iterable[tuple[int, int]] = (),
    pool_bytes: int | None = None,
) -> Peaks:
    """Walk a program and raise ProgramError where it breaks a rule; return its peaks.

    `present` are the objects (other than state, which always exists) that exist before it: kept
    accumulators, a hand-off; `forwarded` are the (segment, micro-batch) whose forward an earlier
    process ran, in the same step. Rules: what is read or changed exists; what is written fresh
    does not exist yet; a backward comes after the forwards of its micro-batch, unless it turns; no
    forward or backward reads state that this step has used and then updated; one instruction's
    objects fit `pool_bytes`.
    """
    alive = set(present)
    forwards = set(forwarded)
    used: set[ObjectKey] = set()
    updated: set[ObjectKey] = set()
    live_bytes = sum(size_bytes(key) for key in alive)
    most_live, most, largest = live_bytes, 0, "-"
    for instruction in program:
        for key in instruction.needs:
            if key.kind is not Kind.STATE and key not in alive:
                raise ProgramError(f"{instruction} needs {key}, which does not exist then")
        for key in instruction.writes:
            if key in alive:
                raise ProgramError(f"{instruction} writes {key} a second time")
            alive.add(key)
            live_bytes += size_bytes(key)
        position = (instruction.segment, instruction.micro_batch)
        if instruction.operation is Operation.BACKWARD and position not in forwards:
            raise ProgramError(f"{instruction} comes before its forward")
        if instruction.operation is Operation.UPDATE:
            updated.update(used.intersection(instruction.changes))
        elif instruction.operation in _COMPUTES:
            for key in instruction.needs:
                if key in updated:
                    raise ProgramError(f"{instruction} needs {key}, which was updated before")
                used.add(key)
            forwards.add(position)
        held = sum(size_bytes(key) for key in set(instruction.touches))
        if held > most:
            most, largest = held, str(instruction)
        if pool_bytes is not None and held > pool_bytes:
            raise ProgramError(f"{instruction} needs {held} bytes of a pool of {pool_bytes}")
        most_live = max(most_live, live_bytes)
        for key in instruction.frees:
            alive.discard(key)
            live_bytes -= size_bytes(key)
    return Peaks(instruction_bytes=most, largest=largest, live_bytes=most_live)
