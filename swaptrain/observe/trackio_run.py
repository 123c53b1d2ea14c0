"""A run of trackio: rows are logged under a name that the run directory keeps."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from swaptrain.observe.scalars import scalars
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.paths import RunPaths

__all__ = ["TrackioRun"]

_ROWS_PER_S = 2000
"""Trackio holds in memory what it has not stored."""


class TrackioRun:
    """Logs to the project that is named like the folder of the run directory.

    Where it is stored is trackio's to say: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL. It
    has no way to take steps back, so a run that goes back, or starts over, gets a new name there.
    """

    name = "trackio"

    def __init__(self, paths: RunPaths, config: Mapping[str, Any]) -> None:
        self._paths, self._config = paths, dict(config)
        self._run: Any = None

    def begin(self, done: int) -> int:
        """Go on with the run of that name, or begin one; return the last step that it has."""
        file = self._paths.trackio
        last = self._open(file.read_text("utf-8") if file.exists() else self._named())
        if last > done:
            last = self._open(self._named())  # trackio ends the run before
        return last

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows; trackio stores them from a thread of its own, and warns where it cannot."""
        for row in rows:
            self._run.log(scalars(row), step=row["step"])
        time.sleep(len(rows) / _ROWS_PER_S)

    def close(self) -> None:
        """Have trackio store what it has."""
        self._run.finish()

    def _open(self, name: str) -> int:
        import trackio

        project = self._paths.run_dir.absolute().parent.name or "swaptrain"
        self._run = trackio.init(
            project=project,
            name=name,
            config=self._config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return int(self._run._next_step) - 1  # it is said nowhere else; without one it is -1

    def _named(self) -> str:
        """Choose a name that no other run has, and keep it."""
        name = f"{self._paths.run_dir.absolute().name}-{secrets.token_hex(3)}"
        write_aside(self._paths.trackio, name.encode())
        return name
