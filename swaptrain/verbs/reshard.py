"""The verb `reshard`: lets a run go on with another number of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, RunError
from swaptrain.planning.prepare import recorded_config
from swaptrain.program.ranks import Ranks
from swaptrain.ranks.layout import RankStore, lay_out, read_ranks
from swaptrain.ranks.limits import rank_count
from swaptrain.ranks.own_disk import refuse_rank_links
from swaptrain.store.access.containment import check_contained
from swaptrain.store.access.lock import RunLock
from swaptrain.store.disk.durable_files import flush_directory, flush_file_system, run_error
from swaptrain.store.paths import RunPaths, rank_dir, rank_dirs
from swaptrain.store.read.step_in_links import delete
from swaptrain.store.slots.slot_disks import SlotDisks
from swaptrain.store.slots.staged_slots import StagedSlots, delete_pools, is_slot_place
from swaptrain.units import how_many
from swaptrain.verbs.plans.ranks import check_ranks_asked

__all__ = ["reshard_run"]


def reshard_run(run_dir: Path, count: int, note: Callable[[str], None]) -> None:
    """Divide a run of several ranks among `count` ranks; 1 makes it the run of one process.

    The step stays, and so does every bit of the state; sums of later steps are added in the order
    of the new ranks. A kill loses nothing: before all of it is there the run is as it was, and from
    then on the same command, or any reshard, completes it. Raises ConfigError, RunError,
    DamagedStoreError.
    """
    paths = RunPaths(run_dir)
    refuse_rank_links(run_dir)
    if not (rank_dirs(run_dir) or paths.is_being_resharded() or paths.reshard_old.is_dir()):
        _of_one_process(run_dir, count, note)
        return
    try:
        with _locked(run_dir, note) as resources:
            if not paths.is_being_resharded():
                # What a reshard that was complete did not come to delete.
                if paths.reshard_old.exists():
                    shutil.rmtree(paths.reshard_old)
                before = rank_dirs(run_dir)
                if not before:
                    _of_one_process(run_dir, count, note)
                    return
                if count == rank_count(run_dir):
                    note(f"{run_dir} is a run of {how_many(count, 'rank')} already")
                    return
                # From the first look to the end nobody trains.
                for directory in before:
                    resources.enter_context(RunLock(directory, note=note))
                if paths.joined.exists():  # of a verb that was killed: another one would replace it
                    RunLock(paths.joined, note=note).close()
                    delete(paths.joined)
                _prepare(run_dir, before, count, note)
            _complete(run_dir, note)
    except OSError as error:
        raise run_error(error, run_dir, "divide anew") from error


def _of_one_process(run_dir: Path, count: int, note: Callable[[str], None]) -> None:
    """Say that nothing is to be done; raises ConfigError where something would be."""
    if count > 1 or not RunPaths(run_dir).store.exists():
        raise ConfigError(
            f"{run_dir} is no run of several ranks: one of one process cannot be divided yet"
        )
    note(f"{run_dir} is a run of one process already")


@contextmanager
def _locked(run_dir: Path, note: Callable[[str], None]) -> Iterator[ExitStack]:
    """Let no other reshard begin; the directory of ranks has no lock of its own afterwards."""
    with RunLock(run_dir, note=note), ExitStack() as resources:
        try:
            yield resources
        finally:
            RunPaths(run_dir).lock.unlink(missing_ok=True)


def _prepare(
    run_dir: Path, before: Sequence[Path], count: int, note: Callable[[str], None]
) -> None:
    """Lay out the new directories, whose locks are held; at the end they are the run, durably."""
    paths, stage = RunPaths(run_dir), StagedSlots(run_dir)
    configs = []
    for directory in before:
        check_contained(directory)
        configs.append(recorded_config(directory))
        disks = None if configs[-1] is None else configs[-1].store.paths
        SlotDisks(directory, disks or ()).mend_links()
    stores = read_ranks(run_dir)
    _check_count(configs[0], stores, count)
    ranks = [Ranks(rank, count) for rank in range(count)]
    stage.check_free(before, [_place(run_dir, own) for own in ranks])
    delete(paths.resharded)
    stage.clear(before)
    try:
        for own in ranks:
            place = partial(stage.place, _place(run_dir, own))
            lay_out(stores, _place(paths.resharded, own), own, note, place=place)
        # Both before the rename. Were the name on the disk first, a power loss could leave a
        # `reshard.ready` without its files, and `_complete` would delete the only state there is.
        flush_file_system(run_dir)
        stage.flush(before)
    except (OSError, RunError):  # no room
        with suppress(OSError):  # the next division deletes it
            delete(paths.resharded)
            stage.clear(before)
        raise
    # From here on the new directories are the run: what is cut short is completed.
    os.rename(paths.resharded, paths.reshard_ready)
    flush_directory(run_dir)


def _check_count(config: Config | None, stores: Sequence[RankStore], count: int) -> None:
    """Raise ConfigError where so many ranks could not go on with the run."""
    trained = [row.segment for s in stores for row in s.root.segments if row.state]
    ranks = Ranks(count=count)
    without = ranks.owners_of_none(trained)
    if without:
        raise ConfigError(
            f"--ranks {count}: rank {without[0]} would own no segment that is trained, of "
            f"{len(trained)}: give fewer"
        )
    if config is None:
        return
    micro_batches = config.data.micro_batches
    if not ranks.divide(micro_batches):
        divisors = [str(n) for n in range(1, micro_batches + 1) if not micro_batches % n]
        raise ConfigError(
            f"--ranks {count}: data.micro_batches of this run is {micro_batches}, which {count} "
            f"ranks cannot divide, and a run keeps it: give one of {', '.join(divisors)}"
        )
    check_ranks_asked(config, [count])


def _place(folder: Path, ranks: Ranks) -> Path:
    return folder if ranks.count == 1 else rank_dir(folder, ranks.rank)


def _complete(run_dir: Path, note: Callable[[str], None]) -> None:
    """Put the new directories in the place of the old ones; may be done again at any point.

    The old ones go aside first, all of them, before the first new one has its name.
    """
    paths = RunPaths(run_dir)
    _check_unmoved(run_dir)
    if paths.reshard_ready.exists():
        paths.reshard_old.mkdir(exist_ok=True)
        for directory in rank_dirs(run_dir):
            os.rename(directory, paths.reshard_old / directory.name)
        flush_directory(paths.reshard_old)
        flush_directory(run_dir)
        # Their folders on other disks have the names that those of the new ones get.
        for directory in rank_dirs(paths.reshard_old):
            delete_pools(directory, run_dir / directory.name)
        os.rename(paths.reshard_ready, paths.reshard_moving)
        flush_directory(run_dir)
    moving = paths.reshard_moving
    StagedSlots(run_dir).move_into_place(rank_dirs(moving) or [moving])
    for path in sorted(moving.iterdir()):
        os.rename(path, run_dir / path.name)
    flush_directory(run_dir)
    # First: as long as the other one is there the command knows that it is not done.
    if paths.reshard_old.exists():
        shutil.rmtree(paths.reshard_old)
    moving.rmdir()
    flush_directory(run_dir)
    count = len(rank_dirs(run_dir)) or 1
    how = "with torchrun" if count > 1 else "without torchrun"
    note(f"{run_dir} is divided among {how_many(count, 'rank')}: start it {how}")


def _check_unmoved(run_dir: Path) -> None:
    """Refuse to complete what was laid out in another place: slots lie by the names of that one."""
    paths = RunPaths(run_dir)
    there = paths.reshard_ready if paths.reshard_ready.exists() else paths.reshard_moving
    places = {one: run_dir / one.name for one in rank_dirs(there)} or {there: run_dir}
    for one, final in places.items():
        if not is_slot_place(one, final):
            raise RunError(
                f"{run_dir} was moved while it was divided anew: move it back to where it was, "
                "give the same command there, and move it then"
            )
