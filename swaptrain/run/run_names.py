"""What a run writes into its directory, and the refusal to write it over somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

from swaptrain.data.record import RunRecord
from swaptrain.errors import ConfigError
from swaptrain.store.access.lock import is_lock_file
from swaptrain.store.paths import RunPaths

__all__ = ["check_files", "check_own"]


def check_own(run_dir: Path) -> None:
    """Raise ConfigError for a directory that is no run's and holds what a run would overwrite.

    A run has a lock from before everything else, and where a person has deleted that, its store.
    """
    if _is_run(run_dir):
        return
    paths = RunPaths(run_dir)
    taken = [path for path in (*paths.files, *paths.folders, *paths.others) if _exists(path)]
    taken += [path for path in (paths.train_data, paths.eval_data) if _is_foreign(path)]
    if taken:
        names = [str(path.relative_to(run_dir)) for path in taken[1:]]
        others = f" (and {', '.join(names)})" if names else ""
        raise ConfigError(
            f"run.dir: {run_dir} is not the directory of a run, and a run would overwrite "
            f"{taken[0]}{others}: set run.dir to another directory, such as "
            f"{run_dir / 'run'}, or move what is there"
        )


def check_files(run_dir: Path) -> None:
    """Raise ConfigError where a directory has the name of a file that starting over deletes."""
    for path in RunPaths(run_dir).files:
        if path.is_dir() and not path.is_symlink():
            raise ConfigError(
                f"{path} is a directory, and a run has a file of that name: move it, so that "
                f"{run_dir} can be started over"
            )


def _is_run(run_dir: Path) -> bool:
    paths = RunPaths(run_dir)
    if is_lock_file(paths.lock) or _exists(paths.starting_over):
        return True
    return paths.store.is_symlink() or paths.segments().is_dir()


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _is_foreign(path: Path) -> bool:
    """Whether there is something that is no record of a run's data.

    A start that was refused after its data has left the record; `data.cache` puts no record there.
    """
    if not _exists(path):
        return False
    return not path.is_file() or not RunRecord(path, refuse=False).is_there
