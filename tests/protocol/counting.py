"""Which instructions wait for the disk: the rule ONE_SEGMENT, in the protocol's own words.

Written from docs/durability.md and not from `swaptrain.program.durability`, which it judges.
"""

from __future__ import annotations

from itertools import groupby

from swaptrain.program.instructions import Operation, Program

__all__ = ["waiting"]


def waiting(program: Program, *, lag: int) -> frozenset[int]:
    """Return the positions that count when everything submitted before them is durable.

    The instructions of a segment that follow each other, with batches between them, are one visit.
    Its first instruction waits. With a lag of 2 the backwards of a visit, if it begins with one,
    go on together, and the last of them waits.
    """
    at = [(position, i) for position, i in enumerate(program) if i.segment]
    found = []
    for _, visit in groupby(at, key=lambda each: each[1].segment):
        positions = list(visit)
        first = 0
        while (
            lag == 2
            and positions[first][1].operation in (Operation.TURN, Operation.BACKWARD)
            and first + 1 < len(positions)
            and positions[first + 1][0] == positions[first][0] + 1
        ):
            first += 1
        found.append(positions[first][0])
    return frozenset(found)
