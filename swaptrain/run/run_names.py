"""What a run writes into its directory, and the refusal to write it over somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

from swaptrain.data.record import RunRecord
from swaptrain.errors import ConfigError
from swaptrain.machine.fingerprint import NOTE_FILE
from swaptrain.store.access.lock import is_lock_file
from swaptrain.store.format.origin import ORIGIN
from swaptrain.store.slots.snapshots import GOING_BACK

__all__ = ["FILES", "FOLDERS", "STARTING_OVER", "check_files", "check_own"]

FOLDERS = ("spill", "slots", "snapshots", "static", "trees", "store", "scratch")
"""The directories of a run but that of its data."""
FILES = ("metrics.jsonl", "trace.json", "config.yaml", NOTE_FILE, GOING_BACK, ORIGIN)
"""The files of a run that go when it is started over."""
STARTING_OVER = "starting-over"
"""In the run directory while it is emptied: the next start goes on with that."""

_ASIDE = ("store.next", *(f"{name}.tmp" for name in FILES))
_OTHERS = (
    *("lock", "id", "id.tmp", "export.request"),
    *(f"{STARTING_OVER}.tmp", "speed.tmp", "speed.record"),
)
_RECORDS = ("data/train.json", "data/eval.json")


def check_own(run_dir: Path) -> None:
    """Raise ConfigError for a directory that is no run's and holds what a run would overwrite.

    A run has a lock from before everything else, and where a person has deleted that, its store.
    """
    if _is_run(run_dir):
        return
    taken = [name for name in (*FILES, *FOLDERS, *_ASIDE, *_OTHERS) if _exists(run_dir / name)]
    taken += [name for name in _RECORDS if _is_foreign(run_dir / name)]
    if taken:
        others = f" (and {', '.join(taken[1:])})" if taken[1:] else ""
        raise ConfigError(
            f"run.dir: {run_dir} is not the directory of a run, and a run would overwrite "
            f"{run_dir / taken[0]}{others}: set run.dir to another directory, such as "
            f"{run_dir / 'run'}, or move what is there"
        )


def check_files(run_dir: Path) -> None:
    """Raise ConfigError where a directory has the name of a file that starting over deletes."""
    for name in FILES:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            raise ConfigError(
                f"{path} is a directory, and a run has a file of that name: move it, so that "
                f"{run_dir} can be started over"
            )


def _is_run(run_dir: Path) -> bool:
    store = run_dir / "store"
    if is_lock_file(run_dir / "lock") or _exists(run_dir / STARTING_OVER):
        return True
    return store.is_symlink() or (store / "segments").is_dir()


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _is_foreign(path: Path) -> bool:
    """Whether there is something that is no record of a run's data.

    A start that was refused behind its data has left the record; `data.cache` puts no record there.
    """
    if not _exists(path):
        return False
    return not path.is_file() or not RunRecord(path, refuse=False).is_there
