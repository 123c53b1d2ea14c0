"""What trace.json says of each step: who was busy when, and whose state was in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swaptrain.program.instructions import Kind, Operation
from swaptrain.report.rows import number
from swaptrain.strict_json import parse_json

__all__ = ["Busy", "Hits", "StepTrace", "TracedSteps", "read_trace"]

_LONGEST_BYTES = 2**16
MOST_EVENTS = 400_000
_MAIN = "MainThread"
_STEP = re.compile(r"step ([0-9]{1,18})")
_STATE = re.compile(rf"{Kind.STATE}/([0-9]{{3,9}})/.*", re.DOTALL)
_COMPUTING = {*Operation}
_MARKS = ("ask for", "need")
_USED = {*Operation, "read", "write", "commit", "finished gradient", *_MARKS}
_FORWARD = {Operation.FORWARD, Operation.LOAD}


@dataclass(frozen=True)
class Busy:
    """An interval of a thread, in seconds from the begin of the step."""

    begin_s: float
    end_s: float
    what: str
    about: str = ""
    nbytes: int = 0


@dataclass
class Hits:
    """Of one segment's state in one step, forwards or backwards: bytes that were used."""

    found_bytes: int = 0
    """That lay in memory since an earlier use."""
    read_bytes: int = 0
    """That had been read from the disk for it, ahead of time or not."""


@dataclass
class StepTrace:
    """One whole step of a trace."""

    step: int
    seconds: float
    computing: list[Busy] = field(default_factory=list)
    waiting: list[Busy] = field(default_factory=list)
    reads: list[Busy] = field(default_factory=list)
    writes: list[Busy] = field(default_factory=list)
    commits: list[Busy] = field(default_factory=list)
    forward: dict[int, Hits] = field(default_factory=dict)
    """By segment: what forwards used."""
    backward: dict[int, Hits] = field(default_factory=dict)
    """What backwards and updates used."""


@dataclass(frozen=True)
class TracedSteps:
    """The whole steps of a trace.json."""

    steps: list[StepTrace]
    problem: str | None = None
    """Why there are none, or not all, in words."""


@dataclass(frozen=True)
class _Event:
    name: str
    thread: str
    begin: float
    """Microseconds, like `end`."""
    end: float
    about: str
    nbytes: int


def read_trace(path: Path) -> TracedSteps | None:
    """Return the whole steps of a trace, None where there is no file. Raises OSError.

    The file may be written to meanwhile: a step that has not ended is left out.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    events: list[_Event] = []
    count = 0
    names: dict[int, str] = {}
    problem = None
    with file:
        for line in iter(lambda: file.readline(_LONGEST_BYTES), b""):
            text = line.strip().removesuffix(b",")
            if text in (b"[", b"]", b"[]", b""):
                continue
            count += 1
            if count > MOST_EVENTS:
                problem = f"the trace is read up to its first {MOST_EVENTS:,} events"
                break
            try:
                event = _event(parse_json(text), names)
            except (ValueError, KeyError, TypeError, AttributeError):
                problem = "a part of the trace is torn, or not what a run writes: it is left out"
                break
            if event is not None and _counts(event.name):
                events.append(event)
    steps = _steps(events)
    if not steps and problem is None:
        problem = "the trace holds no whole step yet"
    return TracedSteps(steps, problem)


def _counts(name: str) -> bool:
    """Whether anything is made of an event of this name: most are of no use here."""
    return name in _USED or name.startswith(("step ", "wait for "))


def _event(found: dict[str, Any], names: dict[int, str]) -> _Event | None:
    """Return a complete event; None for a line that names a thread. Raises what a dict does."""
    if found["ph"] == "M":
        if found["name"] == "thread_name":
            names[found["tid"]] = str(found["args"]["name"])
        return None
    begin, took = number(found["ts"]), number(found["dur"])
    if not (begin >= 0 and took >= 0):
        raise ValueError("a time is no time")
    about = found.get("args", {})
    nbytes = about.get("bytes", 0)
    return _Event(
        str(found["name"]),
        names[found["tid"]],
        begin,
        begin + took,
        str(about.get("of", "")),
        nbytes if type(nbytes) is int else 0,
    )


def _steps(events: list[_Event]) -> list[StepTrace]:
    # Marks first, then what contains others.
    events.sort(key=lambda event: (event.begin, event.name not in _MARKS, -event.end))
    spans = []
    for event in events:
        match = _STEP.fullmatch(event.name)
        if match and event.thread == _MAIN and event.end > event.begin:
            spans.append((int(match[1]), event))
    steps = [StepTrace(number, (span.end - span.begin) / 1e6) for number, span in spans]
    first = 0
    for event in events:  # steps do not overlap, and events are in the order of their begins
        while first < len(spans) and spans[first][1].end <= event.begin:
            first += 1
        for (_, span), step in zip(spans[first:], steps[first:], strict=True):
            if event.end <= span.begin:
                break
            _place(event, span, step)
    _count_hits(events, [span for _, span in spans], steps)
    return steps


def _place(event: _Event, span: _Event, step: StepTrace) -> None:
    begin = (max(event.begin, span.begin) - span.begin) / 1e6
    end = (min(event.end, span.end) - span.begin) / 1e6
    busy = Busy(begin, end, event.name, event.about, event.nbytes)
    if event.thread == _MAIN:
        if event.name in _COMPUTING:
            step.computing.append(busy)
        elif event.name.startswith("wait for "):
            step.waiting.append(busy)
    elif event.name == "read":
        step.reads.append(busy)
    elif event.name == "write":
        step.writes.append(busy)
    elif event.name in ("commit", "finished gradient"):
        step.commits.append(busy)


def _count_hits(events: list[_Event], spans: list[_Event], steps: list[StepTrace]) -> None:
    """Say of each use of state whether it had been read for it, and since when it was there.

    What is asked for is read for its next use, whichever step that is in; the instruction that uses
    it begins after the use.
    """
    asked: set[str] = set()
    used: list[_Event] = []
    current = 0
    for event in events:
        if event.thread != _MAIN:
            continue
        if event.name == "ask for":
            asked.add(event.about)
        elif event.name == "need":
            used.append(event)
        elif event.name in _COMPUTING:
            while current < len(spans) and spans[current].end <= event.begin:
                current += 1
            inside = current < len(spans) and spans[current].begin <= event.begin
            for use in used:
                was_read = use.about in asked
                asked.discard(use.about)
                match = _STATE.fullmatch(use.about)
                if inside and match:
                    step = steps[current]
                    side = step.forward if event.name in _FORWARD else step.backward
                    hits = side.setdefault(int(match[1]), Hits())
                    if was_read:
                        hits.read_bytes += use.nbytes
                    else:
                        hits.found_bytes += use.nbytes
            used = []
