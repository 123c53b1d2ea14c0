"""The verb `reshard`: lets a run go on with another number of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from swaptrain.errors import ConfigError
from swaptrain.program.ranks import Ranks
from swaptrain.ranks.layout import lay_out, read_ranks
from swaptrain.store.access.lock import RunLock
from swaptrain.store.disk.durable_files import flush_directory, flush_file_system, run_error
from swaptrain.store.paths import RunPaths, rank_dir, rank_dirs
from swaptrain.store.read.step_in_links import delete
from swaptrain.units import how_many

__all__ = ["reshard_run"]


def reshard_run(run_dir: Path, count: int, note: Callable[[str], None]) -> None:
    """Divide a run of several ranks among `count` ranks; 1 makes it the run of one process.

    The step stays, and so does every bit of the state; sums of later steps are added in the order
    of the new ranks. A kill loses nothing: before all of it is there the run is as it was, and from
    then on the same command, or any reshard, completes it. Raises ConfigError, RunError,
    DamagedStoreError.
    """
    paths = RunPaths(run_dir)
    try:
        if paths.is_being_resharded():
            _complete(run_dir, note)
            return
        before = rank_dirs(run_dir)
        if not before:
            raise ConfigError(
                f"{run_dir} is no run of several ranks: one of one process cannot be divided yet"
            )
        if count == len(before):
            note(f"{run_dir} is a run of {how_many(count, 'rank')} already")
            return
        with ExitStack() as resources:
            stores = read_ranks(run_dir)
            for directory in before:
                resources.enter_context(RunLock(directory, note=note))
            trained = [row.segment for s in stores for row in s.root.segments if row.state]
            for rank in range(count):
                if not any(Ranks(rank, count).owns(k) for k in trained):
                    raise ConfigError(
                        f"--ranks {count}: rank {rank} would own no segment that is trained, of "
                        f"{len(trained)}: give fewer"
                    )
            delete(paths.resharded)
            for rank in range(count):
                ranks = Ranks(rank, count)
                lay_out(stores, _place(paths.resharded, ranks), ranks, note)
            flush_file_system(run_dir)
            # From here on the new directories are the run: what is cut short is completed.
            os.rename(paths.resharded, paths.reshard_ready)
            flush_directory(run_dir)
        _complete(run_dir, note)
    except OSError as error:
        raise run_error(error, run_dir, "divide anew") from error


def _place(folder: Path, ranks: Ranks) -> Path:
    return folder if ranks.count == 1 else rank_dir(folder, ranks.rank)


def _complete(run_dir: Path, note: Callable[[str], None]) -> None:
    """Put the new directories in the place of the old ones; may be done again at any point.

    The old ones go aside first, all of them, before the first new one has its name.
    """
    paths = RunPaths(run_dir)
    if paths.reshard_ready.exists():
        paths.reshard_old.mkdir(exist_ok=True)
        for directory in rank_dirs(run_dir):
            os.rename(directory, paths.reshard_old / directory.name)
        flush_directory(run_dir)
        os.rename(paths.reshard_ready, paths.reshard_moving)
        flush_directory(run_dir)
    for path in sorted(paths.reshard_moving.iterdir()):
        os.rename(path, run_dir / path.name)
    flush_directory(run_dir)
    paths.reshard_moving.rmdir()
    flush_directory(run_dir)
    shutil.rmtree(paths.reshard_old, ignore_errors=True)
    count = len(rank_dirs(run_dir)) or 1
    how = "with torchrun" if count > 1 else "without torchrun"
    note(f"{run_dir} is divided among {how_many(count, 'rank')}: start it {how}")
