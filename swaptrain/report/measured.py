"""Numbers of a whole run, made of its rows and its starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swaptrain.report.chart import Mark, Unit, said
from swaptrain.report.read import RunFiles, StartSeen
from swaptrain.report.rows import Column

__all__ = ["Compared", "Gap", "by_start", "compared", "floor_s", "gaps", "least_traffic", "median"]
__all__ += ["moved", "rest_s", "start_marks", "total_written"]

_PAUSE_S, _PAUSE_STEPS = 30.0, 3.0
"""From which on two steps do not follow each other: seconds, and times of the second's length."""


_MOST_GAPS = 100


def median(values: Column) -> float:
    """Return the median of what is known, NaN where nothing is."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def floor_s(run: RunFiles) -> Column:
    """Return the least time that each step could have taken."""
    return run.rows["roofline_fraction"] * run.rows["step_s"]


def rest_s(run: RunFiles) -> Column:
    """Return of each step the seconds that no other part has; 0 where parts overlap."""
    parts = ("compute_s", "update_s", "io_wait_s", "data_wait_s")
    taken = sum((np.nan_to_num(run.rows[name]) for name in parts), np.zeros(len(run.rows)))
    return np.maximum(run.rows["step_s"] - taken, 0.0)


def moved(run: RunFiles) -> Column:
    """Return the bytes that each step read and wrote."""
    return run.rows["read_bytes"] + run.rows["write_bytes"]


def total_written(run: RunFiles) -> Column:
    """Return what the run had written after each step."""
    return np.cumsum(np.nan_to_num(run.rows["write_bytes"]))


def by_start(run: RunFiles) -> list[slice]:
    """Return the rows of each start, by the time at which its steps ended."""
    ended = run.rows["ended_at"]
    times = [start.time for start in run.starts]
    edges = [int(np.searchsorted(ended, time)) for time in times] + [len(ended)]
    edges = np.maximum.accumulate(edges).tolist()
    return [slice(begin, end) for begin, end in pairwise(edges)]


def least_traffic(run: RunFiles) -> Column:
    """Return the lower bound of each step's traffic, as its start reckoned it."""
    found = np.full(len(run.rows), np.nan)
    for start, rows in zip(run.starts, by_start(run), strict=True):
        found[rows] = start.expects("least_traffic_bytes")
    return found


@dataclass(frozen=True)
class Compared:
    """A number that was forecast, and what was measured."""

    name: str
    unit: Unit
    forecast: float
    measured: float

    def texts(self) -> list[str]:
        """Return the cells of a table."""
        known = np.isfinite(self.forecast) and np.isfinite(self.measured) and self.forecast > 0
        ratio = f"{self.measured / self.forecast:.2f}" if known else "-"
        texts = [said(self.forecast, self.unit), said(self.measured, self.unit), ratio]
        return [self.name, *texts]


def compared(run: RunFiles) -> tuple[StartSeen, int, list[Compared]] | None:
    """Return the last start that has steps, how many, and its forecast beside their medians.

    The first step of a start does not count where there are others: it fills memory.
    """
    for start, rows in reversed(list(zip(run.starts, by_start(run), strict=True))):
        steps = range(rows.start, rows.stop)
        if not steps:
            continue
        chosen = list(steps[1:] or steps)
        of = {name: run.rows[name][chosen] for name in _MEASURED}
        computing = of["compute_s"] + of["update_s"]
        found = [
            Compared("step", "seconds", start.expects("step_s"), median(of["step_s"])),
            Compared("computing", "seconds", start.expects("compute_s"), median(computing)),
            Compared("read", "bytes", start.expects("read_bytes"), median(of["read_bytes"])),
            Compared("written", "bytes", start.expects("write_bytes"), median(of["write_bytes"])),
            Compared(
                "peak memory",
                "bytes",
                start.expects("peak_host_bytes"),
                _most(of["peak_host_bytes"]),
            ),
        ]
        return start, len(chosen), found
    return None


_MEASURED = ("step_s", "compute_s", "update_s", "read_bytes", "write_bytes", "peak_host_bytes")


def _most(values: Column) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else float("nan")


@dataclass(frozen=True)
class Gap:
    """A time in which no step was under way."""

    begin: float
    end: float
    row: int
    """Of the step after it."""


def gaps(run: RunFiles) -> list[Gap]:
    """Return the times between two steps in which the run stood still; of many the longest."""
    ended, took = run.rows["ended_at"], run.rows["step_s"]
    if len(ended) < 2:
        return []
    begun = ended[1:] - took[1:]
    still = begun - ended[:-1]
    resumed = np.nan_to_num(run.rows["resumed"][1:]) > 0
    new = np.zeros(len(still), bool)
    for rows in by_start(run):
        if 0 < rows.start < len(ended):
            new[rows.start - 1] = True
    is_long = still > np.maximum(_PAUSE_S, _PAUSE_STEPS * took[1:])
    found = np.flatnonzero(is_long | ((new | resumed) & (still > 0)))
    longest: list[int] = found[np.argsort(-still[found])][:_MOST_GAPS].tolist()
    return [Gap(float(ended[i]), float(begun[i]), i + 1) for i in sorted(longest)]


def start_marks(starts: Sequence[StartSeen]) -> list[Mark]:
    """Return where a process began."""
    return [Mark(start.time, "start") for start in starts if np.isfinite(start.time)]
