"""A step's trace as lanes that can be drawn: intervals put together, and requests under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swaptrain.program.instructions import Operation
from swaptrain.report.rows import Column
from swaptrain.report.timeline import Busy, StepTrace

__all__ = ["KINDS", "Lane", "Lanes", "Piece", "busy_s", "lanes_of"]

_MOST_BLOCKS = 1_500
"""Intervals of a lane; nearer than the width of a page over this many, they are one."""
_BINS = 400
FORWARD, BACKWARD, UPDATE, OTHER, WAITING, READS, WRITES, COMMITS = 6, 1, 3, 7, 2, 5, 4, 7
"""Colours of the page's palette."""
KINDS = (
    ("forward", FORWARD, (Operation.FORWARD,)),
    ("backward", BACKWARD, (Operation.TURN, Operation.BACKWARD)),
    ("update", UPDATE, (Operation.UPDATE,)),
    ("exchange", WAITING, (Operation.SHARE, Operation.COLLECT)),
    ("other", OTHER, (Operation.LOAD, Operation.NORMS, Operation.STORE, Operation.EVALUATE)),
)
"""How each operation is drawn in the lane of computing."""


@dataclass(frozen=True)
class Piece:
    """Intervals of one colour."""

    name: str
    color: int
    spans: Column
    """[n, 2] seconds: begin and end."""


@dataclass(frozen=True)
class Lane:
    """One line of a timeline."""

    name: str
    color: int
    pieces: list[Piece] = field(default_factory=list)
    depth: Column | None = None
    """How many at once, in each of so many equal parts of the step; None: intervals are drawn."""


@dataclass(frozen=True)
class Lanes:
    """The timeline of one step."""

    step: int
    seconds: float
    lanes: list[Lane]


def lanes_of(trace: StepTrace) -> Lanes:
    """Return the lanes of a step: computing, waiting, reads, writes, commits."""
    seconds = max(trace.seconds, 1e-9)
    computing = [
        Piece(name, color, _together([b for b in trace.computing if b.what in kinds], seconds))
        for name, color, kinds in KINDS
    ]
    waiting = Piece("waiting", WAITING, _together(trace.waiting, seconds))
    commits = Piece("commits", COMMITS, _together(trace.commits, seconds))
    lanes = [
        Lane("computing", BACKWARD, [piece for piece in computing if len(piece.spans)]),
        Lane("waiting for the disk", WAITING, [waiting]),
        _requests("reads", READS, trace.reads, seconds),
        _requests("writes", WRITES, trace.writes, seconds),
        Lane("commits", COMMITS, [commits]),
    ]
    return Lanes(trace.step, seconds, lanes)


def busy_s(intervals: Sequence[Busy]) -> float:
    """Return the seconds in which at least one of the intervals was under way."""
    total, until = 0.0, 0.0
    for begin, end in sorted((busy.begin_s, busy.end_s) for busy in intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _requests(name: str, color: int, requests: Sequence[Busy], seconds: float) -> Lane:
    depth = np.zeros(_BINS)
    width = seconds / _BINS
    for busy in requests:
        first, last = busy.begin_s / width, busy.end_s / width
        for cell in range(int(first), min(int(last), _BINS - 1) + 1):
            depth[cell] += max(0.0, min(last, cell + 1) - max(first, cell))
    most = int(np.ceil(depth.max() - 1e-6)) if len(requests) else 0
    moved = sum(busy.nbytes for busy in requests)
    if not moved:
        return Lane(f"{name}: none", color, depth=depth)
    return Lane(f"{name}: up to {most} at once", color, depth=depth)


def _together(intervals: Sequence[Busy], seconds: float) -> Column:
    """Return intervals in their order, those that no eye could tell apart as one."""
    gap = seconds / _MOST_BLOCKS
    found: list[list[float]] = []
    for begin, end in sorted((busy.begin_s, busy.end_s) for busy in intervals):
        if found and begin - found[-1][1] <= gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return np.array(found).reshape(-1, 2)
