"""Where the ranks of a run go on: at the step of rank 0, which each of them has in a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.ranks.agreement import echoed
from swaptrain.ranks.group import Group
from swaptrain.store.disk.durable_files import flush_directory
from swaptrain.store.format.root import RootRecord, read_root
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.recovery_rules import flush_everything
from swaptrain.store.slots.slots import Slots

__all__ = ["Standing", "common_step", "recover"]


@dataclass(frozen=True)
class Standing:
    """The steps that a rank has on its disk; None where a tree has none."""

    live: int | None
    """Of the tree that is live; None also where the rank has no store, or begins anew."""
    other: int | None
    """Of the tree that is not."""


def common_step(standings: Sequence[Standing], directories: Sequence[str]) -> int | None:
    """Return the step that all ranks go on from: rank 0's. None where the run is to be created.

    Raises DamagedStoreError for what no interruption leaves: a rank that does not have that step.
    """
    step = standings[0].live
    for rank, standing in enumerate(standings):
        had = [s for s in (standing.live, standing.other) if s is not None]
        if step is None and standing.live:
            raise DamagedStoreError(
                f"rank 0 has no store in {directories[0]}, and rank {rank} is at step "
                f"{standing.live} in {directories[rank]}: is the disk of rank 0 there, or was its "
                "directory deleted? Restore it, or start over with --fresh"
            )
        if step is not None and step not in had:
            found = f"has steps {', '.join(map(str, had))}" if had else "has no store"
            raise DamagedStoreError(
                f"rank 0 is at step {step}, and rank {rank} {found} in {directories[rank]}: is its "
                "disk there, or was it copied at another time? Restore all ranks together, or "
                "start over with --fresh"
            )
    return step


def recover(group: Group, run_dir: Path, root: RootRecord | None) -> RootRecord | None:
    """Bring this rank's store to the step that rank 0 is at; return its root.

    `root` is that of the live tree; None where there is none, or the run is to begin anew. Raises
    DamagedStoreError in all ranks, before anything is written.
    """
    if run_dir.exists():
        # Before rank 0 names its step. Were its switch not durable yet, the others would write the
        # next step over the one that a power loss brings it back to.
        flush_everything(run_dir)
    own = Standing(None if root is None else root.step, _other_step(run_dir, root))
    rows = group.gather([own.live, own.other, str(run_dir)])
    try:
        step = common_step([Standing(row[0], row[1]) for row in rows], [row[2] for row in rows])
    except DamagedStoreError as error:
        raise echoed(error) from None
    paths = RunPaths(run_dir)
    if step is None:
        if root is not None:  # created here, and not in rank 0: what is written of it is kept
            paths.store.unlink()
            flush_directory(run_dir)
        return None
    if own.live != step:
        Slots(run_dir, trees=True).switch_tree()
        root = read_root(run_dir)
    return root


def _other_step(run_dir: Path, root: RootRecord | None) -> int | None:
    """Return the step of the tree that is not live; None where it has no root."""
    if not RunPaths(run_dir).trees.is_dir():
        return None
    tree = Slots(run_dir, trees=True).other_tree()
    other = read_root(run_dir, tree=tree)
    if other is None or (root is not None and other.fingerprint != root.fingerprint):
        return None
    return other.step
