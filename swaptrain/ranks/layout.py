"""The stores of all ranks of a run, read together, and laid out for another number of ranks.

Chunks are linked, not copied, where the file system allows it: on one disk no byte of state moves.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.program.ranks import Ranks
from swaptrain.ranks.own_disk import check_rank_links
from swaptrain.ranks.recovery import Standing, common_step
from swaptrain.store.access.containment import check_contained
from swaptrain.store.access.lock import RunLock, is_held_by_this_thread, lock_owner
from swaptrain.store.disk.durable_files import replace_link, run_error
from swaptrain.store.format.root import (
    RootRecord,
    create_root,
    ensure_group,
    link_static,
    read_root,
)
from swaptrain.store.paths import TREES, RunPaths, link_text, other_tree, rank_dirs, slot_name
from swaptrain.store.read.step_in_links import Copier, delete
from swaptrain.store.read.stored_segments import StoredSegment, check_segment, stored_segment
from swaptrain.units import how_many

__all__ = ["RankStore", "RankTree", "joined", "lay_out", "rank_trees", "read_ranks"]

_OF_ONE = ("rank", "ranks")
"""Keys of a root that a run of one process has not."""


@dataclass(frozen=True)
class RankStore:
    """What one rank has of the step that all ranks are at."""

    directory: Path
    root: RootRecord
    segments: tuple[StoredSegment, ...]


@dataclass(frozen=True)
class RankTree:
    """The tree of one rank that is at the step of all ranks."""

    directory: Path
    tree: str
    root: RootRecord


def rank_trees(run_dir: Path) -> list[RankTree]:
    """Return where all ranks have their common step, by rank, by their roots alone.

    Raises ConfigError where ranks are missing or still to be created, RunError where one trains,
    DamagedStoreError.
    """
    check_rank_links(run_dir)
    directories = rank_dirs(run_dir)
    for directory in directories:
        check_contained(directory)
        if is_held_by_this_thread(directory):
            continue
        if (owner := lock_owner(directory)) is not None:
            raise RunError(
                f"{directory} is being trained ({owner}), and the ranks of a run are read between "
                "two trainings only: stop it (SIGTERM), or wait until it ends"
            )
    roots = [{tree: read_root(directory, tree=tree) for tree in TREES} for directory in directories]
    live = [RunPaths(directory).live_tree() for directory in directories]
    standings = []
    for own, tree in zip(roots, live, strict=True):
        steps = {name: None if root is None else root.step for name, root in own.items()}
        standings.append(Standing(steps.get(tree or ""), steps[other_tree(tree)]))
    step = common_step(standings, [str(directory) for directory in directories])
    if step is None:
        raise ConfigError(f"{run_dir}: the creation of the run was never finished: start it again")
    found = []
    for rank, directory in enumerate(directories):
        tree = next(name for name in TREES if (r := roots[rank][name]) and r.step == step)
        root = roots[rank][tree]
        assert root is not None
        if (root.rank, root.ranks) != (rank, len(directories)):
            raise ConfigError(
                f"{directory} is that of rank {root.rank} of {root.ranks}, and {run_dir} has those "
                f"of {how_many(len(directories), 'rank')}: bring those of all machines together"
            )
        found.append(RankTree(directory, tree, root))
    if len({one.root.fingerprint for one in found}) > 1:
        raise DamagedStoreError("the ranks have stores of different models", path=run_dir)
    return found


def read_ranks(run_dir: Path) -> list[RankStore]:
    """Return the stores of all ranks at their common step, by rank; every record verifies.

    Raises what `rank_trees` raises.
    """
    return [
        RankStore(
            one.directory,
            one.root,
            tuple(_segments(one.directory, one.root, one.tree, one.root.step)),
        )
        for one in rank_trees(run_dir)
    ]


def lay_out(
    stores: Sequence[RankStore],
    there: Path,
    ranks: Ranks,
    note: Callable[[str], None],
    *,
    place: Callable[[Path, Path], Path] = lambda _, slot: slot,
) -> None:
    """Make a run directory of what a rank of another number of ranks owns.

    Its groups, its root and its link to the tree are flushed as they are written. Nothing that is
    brought from before is, nor the links to slots: the caller flushes it as a whole if it is to
    last. With a config, the data, and the metrics of rank 0. `place` is called with a slot of
    before and a new one, and returns the directory to which that leads. Raises OSError.
    """
    first, paths, copier = stores[0], RunPaths(there), Copier(note)
    zeroth = RunPaths(first.directory)
    for path in (zeroth.data, zeroth.buffers, zeroth.initial_weights, zeroth.last_machine):
        copier.bring(path, there / path.relative_to(first.directory))
    for path in (zeroth.config, zeroth.metrics):
        if path.exists():
            there.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there / path.name)
    tree, numbers, before = TREES[0], Counter[str](), Ranks(count=len(stores))
    ensure_group(paths.segments(tree))
    rows = []
    for row in first.root.segments:
        k = row.segment
        owner = stores[before.owner(k)]
        found, row = owner.segments[k - 1], owner.root.segments[k - 1]
        if not ranks.owns(k):
            changed = {"parameters": (), "state": False, "frozen": False}
            rows.append(row.model_copy(update=changed))
            continue
        rows.append(row)
        if found.frozen is not None:
            copier.bring(found.frozen.path, paths.frozen_slot(k))
        if found.state is not None:
            shape_class = found.state.id.rpartition("-")[0]
            slot = paths.slot(slot_name(shape_class, numbers[shape_class]))
            numbers[shape_class] += 1
            copier.bring(found.state.path.resolve(), place(found.state.path, slot))
            link = paths.live_link(k, tree)
            link.symlink_to(link_text(link, slot))
    said = {key: value for key, value in first.root.attributes().items() if key not in _OF_ONE}
    said["segments"] = [row.attributes() for row in rows]
    if ranks.count > 1:
        said |= {"rank": ranks.rank, "ranks": ranks.count}
    for name, group in (("frozen", paths.frozen), ("buffers", paths.buffers)):
        if group.is_dir():
            if group == paths.frozen:
                ensure_group(group)
            link_static(there, name)
    create_root(there, RootRecord.checked(said, paths.root_record(tree)), tree=tree)
    replace_link(paths.store, link_text(paths.store, paths.hierarchy(tree)))


@contextmanager
def joined(run_dir: Path, note: Callable[[str], None]) -> Iterator[Path]:
    """Yield a run directory; of several ranks one that has what all of them have, made of links.

    `RUN/joined`: it is deleted afterwards, and a kill leaves it for the next one to replace. Raises
    what `read_ranks` raises.
    """
    check_rank_links(run_dir)
    if not rank_dirs(run_dir):
        yield run_dir
        return
    stores = read_ranks(run_dir)
    there = RunPaths(run_dir).joined
    lock = RunLock(there, note=note)
    try:
        for path in there.iterdir():
            if path != RunPaths(there).lock:
                delete(path)
        lay_out(stores, there, Ranks(), note)
        lock.close()
        yield there
    except OSError as error:
        raise run_error(error, there, "lay out the ranks in") from error
    finally:
        lock.close()
        delete(there)


def _segments(directory: Path, root: RootRecord, tree: str, step: int) -> Iterator[StoredSegment]:
    for row in root.segments:
        found = stored_segment(directory, row.segment, tree=tree).read()
        check_segment(found, root)
        if found.version not in (None, step):
            raise DamagedStoreError(
                f"a segment is at step {found.version}, and its tree at {step}",
                segment=row.segment,
                path=None if found.state is None else found.state.path,
            )
        yield found
