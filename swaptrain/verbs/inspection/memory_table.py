"""What held memory during the last step of a run, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from swaptrain.errors import ConfigError, RunError
from swaptrain.store.paths import RunPaths
from swaptrain.strict_json import read_json
from swaptrain.units import MIB, format_size

__all__ = ["MemoryOrder", "MemoryReport", "read_memory", "show_memory"]

MemoryOrder = Literal["size", "program"]
"""Of the rows: the largest instruction first, or as they ran."""

_OWN = ("weights", "state", "gradients", "values", "saved")
"""Held for the instruction itself."""
_HOLDERS = (*_OWN, "cache", "staging")
_MOST_BYTES = 16 * MIB
_MOST_ROWS = 48
_LARGEST = 1e18
_LEAST_WIDTH, _WIDEST = 110, 1000
_LESS_IMPORTANT = ("staging", "torch", "micro-batch", "saved", "values", "gradients", "cache")
"""Columns that a narrow terminal does without, the first one first."""


@dataclass(frozen=True)
class MemoryReport:
    """memory.json, after a look at each of its values."""

    step: int
    budget_bytes: int
    base_bytes: int
    instructions: tuple[Mapping[str, Any], ...]
    growth: tuple[Mapping[str, Any], ...]


def read_memory(path: Path) -> MemoryReport:
    """Return what memory.json says; raises ConfigError where there is none, RunError for another.

    `path` is the run directory.
    """
    paths = RunPaths(path)
    if not paths.config.is_file():
        raise ConfigError(f"{path} is no run: it has no config.yaml; give the run.dir of a config")
    try:
        tree = read_json(paths.memory, _MOST_BYTES)
        return MemoryReport(
            step=_count(tree, "step"),
            budget_bytes=_count(tree, "budget_bytes"),
            base_bytes=_count(tree, "base_bytes"),
            instructions=tuple(_instruction(row) for row in tree["instructions"]),
            growth=tuple(_growth(row) for row in tree["growth"]),
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{path} has no {paths.memory.name}: train with run.memory=true, which writes it after "
            "each step (it may be set on a resume)"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{paths.memory} is not what run.memory writes ({error!r}): delete it; the next step "
            "that trains writes it again"
        ) from error


def _count(tree: Any, key: str) -> int:
    value = tree[key]
    if type(value) is not int or not abs(value) < _LARGEST:
        raise ValueError(f"{key} is no count of bytes or steps")
    return value


def _instruction(row: Any) -> Mapping[str, Any]:
    found = {key: _count(row, key) for key in ("position", "segment", "micro_batch")}
    held = {name: _count(row["held"], name) for name in _HOLDERS}
    torch = row["torch"]["allocated"]
    return {
        **found,
        "operation": _word(row),
        "held": held,
        "own": sum(held[name] for name in _OWN),
        "torch": None if torch is None else _count(row["torch"], "allocated"),
        "resident": _count(row, "resident_bytes"),
    }


def _growth(row: Any) -> Mapping[str, Any]:
    found = {key: _count(row, key) for key in ("step", "segment", "bytes_per_step", "steps")}
    return {**found, "operation": _word(row), "holder": _word(row, "holder")}


def _word(row: Any, key: str = "operation") -> str:
    word = row[key]
    if not isinstance(word, str) or not word.isalpha() or len(word) > 20:
        raise ValueError(f"{key} is no word")
    return word


def show_memory(
    report: MemoryReport, order: MemoryOrder, *, console: Console | None = None
) -> None:
    """Print the instructions of the step, what each held in MiB, and what grows."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(_LEAST_WIDTH, console.width)
    peak = max((row["resident"] for row in report.instructions), default=report.base_bytes)
    budget = format_size(report.budget_bytes)
    _say(
        console,
        f"step {report.step}: {format_size(max(0, peak - report.base_bytes))} of memory.host "
        f"{budget} at the most, beside a base of {format_size(report.base_bytes)}; in MiB:",
    )
    rows = list(report.instructions)
    if order == "size":
        rows.sort(key=lambda row: (-row["own"], row["position"]))
    hidden = len(rows) - _MOST_ROWS if order == "size" else 0
    rows = rows[:_MOST_ROWS] if hidden > 0 else rows
    console.print(_fitting(rows, report, console), highlight=False)
    if hidden > 0:
        _say(console, f"... and {hidden} smaller ones (--order program shows all)")
    for found in report.growth:
        place = f"{found['operation']} of segment {found['segment']}"
        _say(
            console,
            f"growth: {found['holder']} by {format_size(found['bytes_per_step'])} a step at "
            f"{place}, found after step {found['step']}",
        )


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _fitting(rows: Sequence[Mapping[str, Any]], report: MemoryReport, console: Console) -> Table:
    """Return the table without columns of nothing, and without those that have no room."""
    left_out = {name for name in _HOLDERS if not any(row["held"][name] for row in rows)}
    if all(row["torch"] is None for row in rows):
        left_out.add("torch")
    for name in ("", *_LESS_IMPORTANT):
        left_out.add(name)
        table = _table(rows, report, left_out)
        unbounded = console.options.update(max_width=_WIDEST)
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            break
    return table


def _table(rows: Sequence[Mapping[str, Any]], report: MemoryReport, left_out: set[str]) -> Table:
    names = ["operation", "segment", "micro-batch", *_HOLDERS, "torch", "resident", "budget"]
    names = [name for name in names if name not in left_out]
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    for row in rows:
        beyond = row["resident"] - report.base_bytes
        cells = {
            "operation": row["operation"],
            "segment": str(row["segment"] or "-"),
            "micro-batch": "-" if row["micro_batch"] < 0 else str(row["micro_batch"]),
            **{name: _mib(row["held"][name]) for name in _HOLDERS},
            "torch": _mib(row["torch"]),
            "resident": _mib(row["resident"]),
            "budget": f"{beyond / report.budget_bytes:.0%}" if report.budget_bytes else "-",
        }
        table.add_row(*(cells[name] for name in names))
    return table


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"
