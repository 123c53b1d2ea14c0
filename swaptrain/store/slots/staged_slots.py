"""Slots on other disks of directories that a run is divided into, before these have their names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from swaptrain.errors import RunError
from swaptrain.store.access.containment import is_pool_link
from swaptrain.store.disk.durable_files import flush_directory, flush_file_system
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.slot_disks import run_token

__all__ = ["StagedSlots", "delete_pools", "is_slot_place"]

_STAGED = ".reshard"


class StagedSlots:
    """New slots on the disks of `store.paths`, in a folder of their own until they count.

    A slot stays on its disk, where it can be linked: `DISK/swaptrain-slots/RUN.reshard/TOKEN/ID`.
    `move_into_place` renames each TOKEN to `DISK/swaptrain-slots/TOKEN`, to which the links of the
    new directories lead already.
    """

    def __init__(self, run_dir: Path) -> None:
        """`run_dir` is the directory of the whole run."""
        self._name = run_token(run_dir) + _STAGED

    def place(self, there: Path, before: Path, slot: Path) -> Path:
        """Return where to put what the slot `before` holds, so that `slot` leads to it.

        `there` is the name that the directory of `slot` will have.
        """
        if not before.is_symlink():
            return slot
        pools, token = Path(os.readlink(before)).parents[1], run_token(there)
        slot.parent.mkdir(parents=True, exist_ok=True)
        slot.symlink_to(pools / token / slot.name)
        return pools / self._name / token / slot.name

    def check_free(self, before: Sequence[Path], after: Sequence[Path]) -> None:
        """Raise RunError where another run's slots lie in the place of new ones.

        `before` are the directories of the run as it is, `after` those that it is divided into.
        """
        own = {pool for directory in before for pool in _own_pools(directory, directory)}
        for pools in _pools(before):
            for pool in (pools / run_token(there) for there in after):
                if pool not in own and pool.is_dir() and any(pool.iterdir()):
                    raise RunError(
                        f"{pool} holds slots of another run: if that run was moved, rename the "
                        "folder as its own command says; if it was deleted, delete the folder too; "
                        "then run the same command again"
                    )

    def clear(self, directories: Sequence[Path]) -> None:
        """Delete what an earlier division left on the disks that `directories` have slots on."""
        for pools in _pools(directories):
            if (pools / self._name).is_dir():
                shutil.rmtree(pools / self._name)

    def flush(self, directories: Sequence[Path]) -> None:
        """Make all that was placed for `directories` durable."""
        for pools in _pools(directories):
            if (pools / self._name).is_dir():
                flush_file_system(pools / self._name)
                flush_directory(pools)

    def move_into_place(self, directories: Sequence[Path]) -> None:
        """Move what was placed for `directories` to where their links lead, durably.

        May be done again at any point. The slots of before are gone (`delete_pools`).
        """
        for pools in _pools(directories):
            folder = pools / self._name
            if not folder.is_dir():
                continue
            for pool in sorted(folder.iterdir()):
                os.rename(pool, pools / pool.name)
            # Before the folder goes. Were its removal on the disk without the renames, a power loss
            # would lose the slots that it had, when those of before are deleted.
            flush_directory(folder)
            folder.rmdir()
            flush_directory(pools)


def delete_pools(directory: Path, named: Path) -> None:
    """Delete the slots on other disks of a run's directory, which was called `named` before.

    Durably: what gets their names next must not meet them again.
    """
    pools = _own_pools(directory, named)
    for pool in pools:
        if pool.is_dir():
            shutil.rmtree(pool)
        pool.with_name(pool.name + ".owner").unlink(missing_ok=True)
    for folder in sorted({pool.parent for pool in pools}):
        if folder.is_dir():
            flush_directory(folder)


def is_slot_place(directory: Path, named: Path) -> bool:
    """Whether what a directory has on other disks lies there as that of one called `named`."""
    token = run_token(named)
    return all(slot.parent.name == token for slot in _targets(directory))


def _own_pools(directory: Path, named: Path) -> set[Path]:
    token = run_token(named)
    return {slot.parent for slot in _targets(directory) if slot.parent.name == token}


def _pools(directories: Sequence[Path]) -> list[Path]:
    """Return the folders of all runs' slots on the disks where `directories` have some."""
    return sorted({slot.parents[1] for one in directories for slot in _targets(one)})


def _targets(directory: Path) -> Iterator[Path]:
    for link in RunPaths(directory).slots.glob("*"):
        if link.is_symlink() and is_pool_link(target := os.readlink(link), link.name):
            yield Path(target)
