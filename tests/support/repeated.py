"""Counts the work that runs do again after they were killed, from a log of what each completed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swaptrain.program.instructions import Instruction, Operation

__all__ = ["Again", "lives", "logger", "repeated"]

Done = tuple[int, str, int, int]
"""Step, operation, segment, micro-batch."""


def logger(path: Path) -> Callable[[int, Instruction], None]:
    """Return an observer for `train` that writes each completed instruction, and begin a life."""
    # Not os.write: a test that kills at a system call counts those.
    file = path.open("ab", buffering=0)
    file.write(b"begin\n")

    def observe(step: int, instruction: Instruction) -> None:
        if instruction.segment and instruction.operation is not Operation.EVALUATE:
            i = instruction
            file.write(f"{step} {i.operation} {i.segment} {i.micro_batch}\n".encode())

    return observe


def lives(path: Path) -> list[list[Done]]:
    """Return what each process of a run completed, in order; a turn counts as a backward."""
    found: list[list[Done]] = []
    for line in path.read_text().splitlines():
        if line == "begin":
            found.append([])
            continue
        step, operation, segment, micro_batch = line.split()
        if operation == "turn":
            operation = "backward"
        found[-1].append((int(step), operation, int(segment), int(micro_batch)))
    return found


@dataclass(frozen=True)
class Again:
    """What one process did that an earlier one had completed."""

    instructions: tuple[Done, ...]

    def within(self, backwards: int) -> bool:
        """Whether all of it is one segment's forward or so many segments' backwards, of one step.

        A deferred update is of the step before the forward that it comes with.
        """
        segments = {segment for _, _, segment, _ in self.instructions}
        steps = {step for step, op, _, _ in self.instructions if op != "update"}
        directions = {op for _, op, _, _ in self.instructions if op in ("forward", "backward")}
        updates = {step for step, op, _, _ in self.instructions if op == "update"}
        most = backwards if directions == {"backward"} else 1
        return len(segments) <= most and max(len(steps), len(directions), len(updates)) <= 1


def repeated(found: list[list[Done]]) -> list[Again]:
    """Return what each process but the first did again."""
    done: set[Done] = set(found[0])
    result = []
    for life in found[1:]:
        result.append(Again(tuple(entry for entry in life if entry in done)))
        done.update(life)
    return result
