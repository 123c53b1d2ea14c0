"""Show where the time of a step goes, from a run's trace.json (`run.trace=N`).

Two tables, medians over the traced steps but for the first. What the main thread does, each part
without the parts inside it, in a step's forward half and in the half that turns round and goes
backward; with clipping the updates of the step before are in the forward half. And what the disk
does meanwhile: the share of the time in which requests are under way, how many at once, and their
bytes. A flush is a part of its write; checksums are the processor's.

    python -m swaptrain --config big.yaml run.trace=5
    python scripts/step_times.py runs/big

The parts, in the order of an instruction:
  bring, take a slab                   gets what it needs into memory; take a slab: memory for it
  move, zero, give back pages          memory that goes from one slab to another
  wait for a read, a write, room,      the disk is waited for: what was to be read is not there yet,
    a place, a view, values            or memory is not free before something is written
  read ahead, write behind             chooses what to read next and what to spill, and asks for it
  forward, turn, backward, update,     computes; the turn is the last segment's forward and backward
    norms, load, evaluate              in one; norms are for clipping; load brings a batch
  begin to write                       hands a segment's new state to the thread that commits
  wait for a commit, for a slot        until the segment before is durable (store.commit.lag)
  look at memory                       compares the resident set with memory.host
  plan memory                          decides what memory holds when in the step
  the loop itself                      all else
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_US_PER_MS = 1000
_MAIN = "MainThread"
_HALVES = ("forward", "backward")
_REQUESTS = ("read or write", "read", "write", "checksum", "flush")
_LEAST_MS = 0.05


@dataclass(frozen=True)
class Event:
    """A complete event of the trace; microseconds."""

    name: str
    thread: str
    begin: float
    end: float
    nbytes: int


def events(path: Path) -> list[Event]:
    """Read a trace; raises SystemExit where there is none."""
    try:
        return _events(json.loads(path.read_text()))
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}; train with run.trace=5") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no trace that swaptrain wrote ({error})") from error


def _events(found: list[dict[str, Any]]) -> list[Event]:
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    return [
        Event(
            e["name"],
            names[e["tid"]],
            e["ts"],
            e["ts"] + e["dur"],
            e.get("args", {}).get("bytes", 0),
        )
        for e in found
        if e["ph"] == "X"
    ]


def halves(step: Event, main: Sequence[Event]) -> dict[str, tuple[float, float]]:
    """Return when the halves of a step begin and end: the second one where the turn is brought."""
    inside = [e for e in main if step.begin < e.begin < step.end]
    turn = min((e.begin for e in inside if e.name in ("turn", "backward")), default=step.end)
    brought = max((e.begin for e in inside if e.name == "bring" and e.begin < turn), default=turn)
    return {"forward": (step.begin, brought), "backward": (brought, step.end)}


def own_times(main: Sequence[Event], begin: float, end: float) -> dict[str, float]:
    """Return the time of each part that begins in an interval, without the parts inside it."""
    found: dict[str, float] = defaultdict(float)
    open_: list[Event] = []
    for event in sorted(main, key=lambda e: (e.begin, -e.end)):
        if not begin <= event.begin < end or event.name.startswith("step "):
            continue
        while open_ and open_[-1].end <= event.begin:
            open_.pop()
        if open_:
            found[open_[-1].name] -= event.end - event.begin
        found[event.name] += event.end - event.begin
        open_.append(event)
    found["the loop itself"] = end - begin - sum(found.values())
    return found


def under_way(requests: Iterable[Event], begin: float, end: float) -> tuple[float, float]:
    """Return the share of an interval with a request under way, and how many there are then."""
    marks = []
    for event in requests:
        if event.begin < end and event.end > begin:
            marks += [(max(event.begin, begin), 1), (min(event.end, end), -1)]
    busy = total = 0.0
    depth, since = 0, begin
    for moment, change in sorted(marks):
        busy += (moment - since) if depth else 0.0
        total += (moment - since) * depth
        depth, since = depth + change, moment
    return busy / (end - begin), total / busy if busy else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory, or its trace.json")
    parser.add_argument("--skip", type=int, default=1, help="steps to leave out (default 1)")
    options = parser.parse_args(arguments)
    path = options.run / "trace.json" if options.run.is_dir() else options.run
    found = events(path)
    main_thread = [e for e in found if e.thread == _MAIN]
    whole = sorted((e for e in main_thread if e.name.startswith("step ")), key=lambda e: e.begin)
    steps = whole[options.skip :]
    if not steps:
        raise SystemExit(
            f"{path} has {len(whole)} whole steps, and --skip leaves out {options.skip}: raise "
            "run.trace, or lower --skip"
        )
    requests = {kind: [e for e in found if e.name in kind.split(" or ")] for kind in _REQUESTS}
    lengths: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    disk: dict[str, dict[str, list[tuple[float, float, float]]]] = {kind: {} for kind in _REQUESTS}
    for step in steps:
        for half, (begin, end) in halves(step, main_thread).items():
            lengths[half].append(end - begin)
            if begin == end:
                continue
            for name, took in own_times(main_thread, begin, end).items():
                parts[name][half].append(took)
            for kind, of_kind in requests.items():
                moved = sum(e.nbytes for e in of_kind if begin <= e.begin < end)
                seen = (*under_way(of_kind, begin, end), moved / 2**20)
                disk[kind].setdefault(half, []).append(seen)

    def milliseconds(times: Sequence[float]) -> float:
        # A part that a step does not have took no time in it.
        return statistics.median([*times, *[0.0] * (len(steps) - len(times))]) / _US_PER_MS

    console = Console(width=None if sys.stdout.isatty() else 120)
    names = ", ".join(step.name.removeprefix("step ") for step in steps)
    console.print(f"medians of steps {names}", highlight=False)
    table = Table("main thread, ms", box=None, show_footer=True)
    totals = [milliseconds(lengths[half]) for half in _HALVES]
    for half, total in zip(_HALVES, totals, strict=True):
        table.add_column(half, justify="right", footer=f"{total:.1f}")
    table.add_column("of the step", justify="right")
    taken = {name: [milliseconds(row[half]) for half in _HALVES] for name, row in parts.items()}
    for name, cells in sorted(taken.items(), key=lambda item: -sum(item[1])):
        if max(cells) >= _LEAST_MS:
            share = sum(cells) / sum(totals)
            table.add_row(name, *(f"{cell:.1f}" for cell in cells), f"{share:.1%}")
    console.print(table)
    table = Table("disk", "half", box=None)
    for column in ("under way", "at once", "MiB"):
        table.add_column(column, justify="right")
    for kind, row in disk.items():
        for half, seen in row.items():
            share, depth, moved = (statistics.median(column) for column in zip(*seen, strict=True))
            size = f"{moved:,.0f}" if moved else ""
            table.add_row(kind, half, f"{share:.0%}", f"{depth:.1f}", size)
    console.print(table)


if __name__ == "__main__":
    main()
