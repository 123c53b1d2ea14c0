"""Proves a program: nothing is read before it is written, nor after it is dead, in the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.sharing import exchanged

__all__ = ["Peaks", "ProgramError", "check_program", "check_ranks"]


_COMPUTES = (Operation.FORWARD, Operation.TURN, Operation.BACKWARD)
_ADDS = (Operation.TURN, Operation.BACKWARD)
_TAKES = (Operation.UPDATE, Operation.NORMS)


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

    `present` are the objects (other than state, which always exists) that exist before it:
    finished gradients, a hand-off; `forwarded` are the (segment, micro-batch) whose forward an
    earlier process ran, in the same step. Rules: what is read or changed exists; what is written
    fresh does not exist yet; a backward comes after the forwards of its micro-batch, unless it
    turns; no forward or backward reads state that this step has used and then updated; sums are
    collected after all backwards of their segment and before they are used, where ranks exchange
    anything; one instruction's objects fit `pool_bytes`, with what other ranks have sent.
    """
    exchanges = any(instruction.is_exchange for instruction in program)
    begun: set[int] = set()
    collected: set[int] = set()
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
        if exchanges:
            _check_sums(instruction, begun, collected)
        sent = {key for key in alive if key.kind is Kind.SHARED} if exchanges else set()
        held = sum(size_bytes(key) for key in sent.union(instruction.touches))
        if held > most:
            most, largest = held, str(instruction)
        if pool_bytes is not None and held > pool_bytes:
            raise ProgramError(f"{instruction} needs {held} bytes of a pool of {pool_bytes}")
        most_live = max(most_live, live_bytes)
        for key in instruction.frees:
            alive.discard(key)
            live_bytes -= size_bytes(key)
    return Peaks(instruction_bytes=most, largest=largest, live_bytes=most_live)


def _check_sums(instruction: Instruction, begun: set[int], collected: set[int]) -> None:
    """Raise ProgramError where the sums of a segment are not collected once, after the last one.

    `begun` and `collected` are the segments whose sums were begun, and those whose sums of all
    ranks are added up.
    """
    k = instruction.segment
    sums = any(key.kind is Kind.ACCUMULATOR for key in instruction.touches)
    if instruction.operation is Operation.COLLECT:
        if k in collected or k not in begun:
            raise ProgramError(f"{instruction} has no sums to bring together")
        collected.add(k)
    elif sums and instruction.operation in _ADDS:
        if k in collected:
            raise ProgramError(f"{instruction} adds to sums that were brought together before")
        begun.add(k)
    elif sums and instruction.operation in _TAKES and k in begun - collected:
        raise ProgramError(f"{instruction} uses the sums of one rank")


def check_ranks(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless the ranks, each with its program, exchange the same in one order.

    Of each array that is shared one rank has the state and the others get it; of the sums of a
    segment one rank changes its own, and the others only read theirs.
    """
    exchanges = [[i for i in program if i.is_exchange] for program in programs]
    if len({len(found) for found in exchanges}) > 1:
        raise ProgramError("the ranks exchange unequally often")
    for together in zip(*exchanges, strict=True):
        first = together[0]
        objects = [[(key.segment, key.name) for key in exchanged(one)] for one in together]
        same = {(one.operation, one.graph, one.segment) for one in together}
        if len(same) > 1 or any(found != objects[0] for found in objects):
            raise ProgramError(f"{first} of one rank meets another exchange of the others")
        for place in range(len(objects[0])):
            givers = [one for one in together if _owns(one, exchanged(one)[place])]
            if len(givers) != 1:
                raise ProgramError(f"{first}: {len(givers)} ranks own {objects[0][place]}")


def _owns(instruction: Instruction, key: ObjectKey) -> bool:
    """Whether the rank of an exchange owns the segment that an object of it belongs to."""
    if instruction.operation is Operation.SHARE:
        return key in instruction.reads
    return key in instruction.changes
