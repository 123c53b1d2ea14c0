"""The verb `report`: one HTML page of a run, or of two side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.observe.step_metrics import time_stamp
from swaptrain.ranks.limits import rank_count
from swaptrain.report.read import RunFiles, RunState, read_run_files
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.paths import RunPaths, rank_dirs, rank_of
from swaptrain.units import format_duration, format_size, how_many
from swaptrain.verbs.inspect import summary
from swaptrain.verbs.inspection.report import last_rows, read_run

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], to: Path | None, note: Callable[[str], None]) -> Path:
    """Write the page of one or two runs, and return where; `note` hears what it lacks.

    `to` null is the first run's report.html. Raises ConfigError where that is another file than a
    report, where a run is none or of another format, and where a package is missing; RunError where
    the page cannot be written; DamagedStoreError after the page where a record does not verify.
    """
    page_of, mark = _page()
    path = RunPaths(runs[0]).report if to is None else to
    _check_target(path, mark)
    damaged: list[DamagedStoreError] = []
    found = [_read(run, label, damaged) for run, label in zip(runs, _labels(runs), strict=True)]
    for words in filter(None, map(_said_of_ranks, runs)):
        note(words)
    for run in found:
        for problem in run.problems:
            note(f"{run.path}: {problem}")
    content = page_of(found, time_stamp())
    write_aside(path, content)
    note(f"{format_size(len(content))}, to be opened in a browser")
    if damaged:
        damaged[0].add_note(f"{path} is written, and says nothing of the store")
        raise damaged[0]
    return path


def _page() -> tuple[Callable[[Sequence[RunFiles], float], bytes], bytes]:
    """Import what draws; raises ConfigError where a package is missing."""
    try:
        from swaptrain.report.page import MARK, page_of
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("swaptrain"):
            raise
        raise ConfigError(
            f"report needs a package that is not installed ({error.name}): "
            "pip install 'swaptrain[report]'"
        ) from error
    return page_of, MARK


def _check_target(path: Path, mark: bytes) -> None:
    """Refuse to write over anything but an earlier report."""
    if path.is_dir():
        raise ConfigError(f"--to {path}: is a directory; name a file, such as {path / 'run.html'}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--to {path}: there is no directory {path.parent}; make it first")
    if not os.path.lexists(path):
        return
    try:
        with path.open("rb") as file:
            is_report = path.is_file() and file.read(len(mark)) == mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not is_report:
        raise ConfigError(f"{path} is there and is no report: name another file with --to")


def _labels(runs: Sequence[Path]) -> list[str]:
    """Return what the charts call each run: its last name, or where two have that, its path."""
    names = [run.absolute().name or str(run) for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [str(run) for run in runs]
    if len(set(paths)) == len(paths):
        return paths
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]


def _said_of_ranks(run: Path) -> str | None:
    """Say of which rank the charts are; None for a run of one process."""
    directories = rank_dirs(run)
    if not directories:
        return None
    first = rank_of(directories[0])
    found, count = len(directories), rank_count(run)
    has = "holds" if found == count else f"has {found} of the {count} directories of"
    return f"{run} {has} a run of {how_many(count, 'rank')}: the charts are of rank {first}"


def _read(run: Path, label: str, damaged: list[DamagedStoreError]) -> RunFiles:
    """Read the files of a run; of several ranks those of the first one, and lines of all."""
    path = (rank_dirs(run) or [run])[0]
    try:
        seen = read_run(path, lines=1)
    except DamagedStoreError as error:
        damaged.append(error)
        config = RunState(f"the store does not verify: {error}", (), None, None)
        return read_run_files(path, label, config)
    root = seen.root
    state = RunState(
        text=seen.state,
        facts=[*[(n, t) for n, t in summary(seen) if n in _FACTS], *_rank_facts(run)],
        host_bytes=seen.config.memory.host,
        last_step=seen.config.train.steps,
        writer=seen.writer,
        machine=dict(root.choices.machine or {}) if root is not None else {},
    )
    return read_run_files(path, label, state)


def _rank_facts(run: Path) -> Iterator[tuple[str, str]]:
    """Yield what each rank did in a step: medians of its last steps."""
    for number, directory in enumerate(rank_dirs(run)):
        rank = rank_of(directory)
        name = f"rank {rank}" + (", which is shown" if not number else "")
        rows = last_rows(RunPaths(directory).metrics, _LAST_STEPS)
        if not rows:
            yield name, "no step yet"
            continue
        usual = {key: median(_figure(row, key) for row in rows) for key in _RANK_KEYS}
        sizes = (format_size(usual[f"{key}_bytes"]) for key in ("read", "write", "exchange"))
        read, written, exchanged = sizes
        yield (
            name,
            f"step {_figure(rows[-1], 'step'):,.0f}; median of its last {len(rows)}: {read} read, "
            f"{written} written, {exchanged} exchanged, {format_duration(usual['step_s'])}, of "
            f"which {format_duration(usual['exchange_wait_s'])} waiting for other ranks",
        )


def _figure(row: Mapping[str, Any], key: str) -> float:
    """Return a number of a line; 0 where it has none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


_LAST_STEPS = 20
_RANK_KEYS = ("read_bytes", "write_bytes", "exchange_bytes", "step_s", "exchange_wait_s")

_FACTS = {
    *("run", "model", "began from", "adapter", "trained", "data", "optimizer"),
    *("memory.host", "snapshot", "disk"),
}
