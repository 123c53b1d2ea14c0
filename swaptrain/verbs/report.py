"""The verb `report`: one HTML page of a run, or of two side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.observe.step_metrics import time_stamp
from swaptrain.report.read import RunFiles, RunState, read_run_files
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.paths import RunPaths
from swaptrain.units import format_size
from swaptrain.verbs.inspect import summary
from swaptrain.verbs.inspection.report import read_run

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], to: Path | None, note: Callable[[str], None]) -> Path:
    """Write the page of one or two runs, and return where; `note` hears what it lacks.

    `to` null is the first run's report.html. Raises ConfigError where that is another file than a
    report, where a run is none or of another format, and where a package is missing; RunError where
    the page cannot be written; DamagedStoreError behind the page where a record does not verify.
    """
    page_of, mark = _page()
    path = RunPaths(runs[0]).report if to is None else to
    _check_target(path, mark)
    damaged: list[DamagedStoreError] = []
    found = [_read(run, label, damaged) for run, label in zip(runs, _labels(runs), strict=True)]
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


def _read(path: Path, label: str, damaged: list[DamagedStoreError]) -> RunFiles:
    try:
        seen = read_run(path, lines=1)
    except DamagedStoreError as error:
        damaged.append(error)
        config = RunState(f"the store does not verify: {error}", (), None, None)
        return read_run_files(path, label, config)
    root = seen.root
    state = RunState(
        text=seen.state,
        facts=[(n, t) for n, t in summary(seen) if n in _FACTS],
        host_bytes=seen.config.memory.host,
        last_step=seen.config.train.steps,
        writer=seen.writer,
        machine=dict(root.choices.machine or {}) if root is not None else {},
    )
    return read_run_files(path, label, state)


_FACTS = {
    *("run", "model", "began from", "adapter", "trained", "data", "optimizer"),
    *("memory.host", "snapshot", "disk"),
}
