"""What one system did in a comparison, of several rounds, and as a row of its table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from swaptrain.units import format_size

__all__ = ["Result", "show", "together"]


@dataclass(frozen=True)
class Result:
    """Medians of one system's steps, or why there are none."""

    system: str
    limit: str
    rows: list[dict[str, Any]]
    failure: str = ""
    commit_every: int = 1
    ends: int = 1
    """Rows at the end that are last steps of a run."""
    gpu_busy: float | None = None
    """Share of the measured steps in which the GPU ran a kernel."""

    def median(self, key: str) -> float:
        """Return the median of a column; with commit_every m > 1, of a mean step.

        Only the last step of a run commits then, since a run ends with a commit: the others'
        median counts m - 1 times.
        """
        return self._median([float(row[key]) for row in self.rows])

    def floor_s(self) -> float | None:
        """Return the least seconds that this run's computing and bytes allowed; None: not known."""
        if any(row.get("roofline_fraction") is None for row in self.rows):
            return None
        return self._median([row["step_s"] * row["roofline_fraction"] for row in self.rows])

    def _median(self, column: list[float]) -> float:
        if self.commit_every == 1:
            return statistics.median(column)
        usual = statistics.median(column[: -self.ends])
        return usual + (statistics.median(column[-self.ends :]) - usual) / self.commit_every


def together(runs: Sequence[Result]) -> Result:
    """Return one system's steps of all rounds, or the first failure of one.

    With store.commit.every > 1 the steps that commit stay the last ones.
    """
    failed = next((run for run in runs if run.failure), None)
    if failed is not None:
        return failed
    return replace(
        runs[0],
        rows=[row for run in runs for row in run.rows[:-1]] + [run.rows[-1] for run in runs],
        ends=len(runs),
        gpu_busy=None
        if runs[0].gpu_busy is None
        else statistics.median(run.gpu_busy for run in runs if run.gpu_busy is not None),
    )


def show(title: str, tokens: int, results: Sequence[Result]) -> None:
    """Print a table of systems that took the same steps, of so many tokens each."""
    own = next((r for r in results if r.system == "swaptrain" and not r.failure), None)
    own_s, floor_s = (own.median("step_s"), own.floor_s()) if own is not None else (None, None)
    on_gpu = any(r.gpu_busy is not None for r in results)
    columns = ["limit", "s/step", "min to max", "tokens/s", "x swaptrain", "x its floor", "read"]
    columns += ["written", "peak", *(["GPU peak", "GPU busy"] if on_gpu else []), "last loss"]
    table = Table("system", title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for r in results:
        if r.failure:
            table.add_row(r.system, r.limit, r.failure)
            continue
        seconds, step_s = [row["step_s"] for row in r.rows], r.median("step_s")
        cells = [
            f"{step_s:.2f}",
            f"{min(seconds):.2f} to {max(seconds):.2f}",
            f"{tokens / step_s:.0f}",
            f"{step_s / own_s:.2f}" if own_s else "-",
            f"{step_s / floor_s:.2f}" if floor_s else "-",
            format_size(r.median("read_bytes")),
            format_size(r.median("write_bytes")),
            format_size(max(row["peak_bytes"] for row in r.rows)),
        ]
        if on_gpu:
            cells.append(format_size(max(row["peak_device_bytes"] for row in r.rows)))
            cells.append("-" if r.gpu_busy is None else f"{r.gpu_busy:.0%}")
        table.add_row(r.system, r.limit, *cells, f"{r.rows[-1]['loss']:.4f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
