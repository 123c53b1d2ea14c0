"""Shows the rows of metrics.jsonl to other programs, each beside the run on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.observe.tensorboard_events import TensorboardEvents
from swaptrain.observe.trackio_run import TrackioRun
from swaptrain.store.paths import RunPaths
from swaptrain.strict_json import parse_json

__all__ = ["Reporter", "Reports", "import_reporters", "next_rows", "open_reports"]

_POLL_S = 1.0
_MOST_ROWS = 500
"""That are handed on at once."""
_LAST_S = 10.0
"""For what is left at the end of a run."""


class Reporter(Protocol):
    """What takes rows; it may raise anything, and may take its time."""

    name: str

    def begin(self, done: int) -> int:
        """Return the last step, of `done`, that needs no report; later ones count no more."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows of steps that follow, each once."""

    def close(self) -> None:
        """Take no more."""


class Reports:
    """Follows metrics.jsonl as it grows, so that no step waits and nothing is queued or dropped.

    A reporter that fails becomes a note, as does one that is late when the run ends: the next start
    gives it what it lacks.
    """

    def __init__(
        self, reporters: Sequence[Reporter], metrics: Path, note: Callable[[str], None]
    ) -> None:
        self._reporters, self._metrics, self._note = reporters, metrics, note
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, done: int) -> None:
        """Begin, now that metrics.jsonl has no row of a step after `done`."""
        for reporter in self._reporters:
            thread = threading.Thread(
                target=self._follow, args=(reporter, done), name=reporter.name, daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait for the last rows, some seconds at most; once is enough, more does no harm."""
        self._ending.set()
        until = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self._note(
                    f"{thread.name} has not taken the last rows within {_LAST_S:g} s "
                    "(train.report_to): the next start of this run gives them"
                )
        self._threads.clear()

    def _follow(self, reporter: Reporter, done: int) -> None:
        try:
            last, offset = reporter.begin(done), 0
            while True:
                ending = self._ending.is_set()  # before the rows are read: else the last are missed
                rows, offset = next_rows(self._metrics, offset)
                new = [row for row in rows if row["step"] > last]
                if new:
                    reporter.write(new)
                if not rows:
                    if ending:
                        break
                    self._ending.wait(_POLL_S)
            reporter.close()
        except Exception as error:  # of a package that is somebody else's
            self._note(
                f"{reporter.name} takes no more rows ({_line(error)}): the run goes on without it, "
                "and metrics.jsonl has all steps"
            )


def import_reporters(names: Sequence[str]) -> None:
    """Import what `train.report_to` needs, so that its memory counts to the base.

    Raises ConfigError where a package is missing or does not work.
    """
    for name in names:
        try:
            if name == "tensorboard":
                import tensorboard.compat.proto.event_pb2
                import tensorboard.summary.writer.record_writer  # noqa: F401
            else:
                import trackio  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"train.report_to: {name} needs a package that is not installed ({error.name}): "
                f"pip install 'swaptrain[{name}]'"
            ) from error
        except Exception as error:  # a package of another version, which may raise anything
            raise ConfigError(
                f"train.report_to: {name} cannot be imported ({_line(error)}): take it out of the "
                f"list, or pip install 'swaptrain[{name}]'"
            ) from error


def open_reports(config: Config, note: Callable[[str], None]) -> Reports:
    """Return the reports of a run, not yet begun; nothing is written."""
    paths = RunPaths(config.run.dir)
    make: dict[str, Callable[[], Reporter]] = {
        "tensorboard": lambda: TensorboardEvents(paths.tensorboard),
        "trackio": lambda: TrackioRun(paths, config.to_tree()),
    }
    return Reports([make[name]() for name in config.train.report_to], paths.metrics, note)


def next_rows(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the next rows after `offset`, in bytes, and where they end; only whole lines count.

    Raises ValueError for a line that is no row.
    """
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n") or len(rows) == _MOST_ROWS:
                break
            rows.append(parse_json(line))
            offset += len(line)
    return rows, offset


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
