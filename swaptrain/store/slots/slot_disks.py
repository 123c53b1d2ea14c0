"""On which of several disks a run's slots lie."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from swaptrain.errors import ConfigError, RunError
from swaptrain.store.access.containment import POOL, is_pool_link
from swaptrain.store.disk.durable_files import (
    disk_errors,
    flush_directory,
    flush_file_system,
    make_directory,
    replace_link,
    write_aside,
)
from swaptrain.store.paths import RunPaths

__all__ = ["SlotDisks", "SlotSpread", "delete_slots", "run_token"]


class SlotSpread:
    """Which of several disks takes a slot, by the slots that were placed before it.

    A class of one segment has two slots, which its commits write in turn, as those of other such
    classes do in the same steps. So slots of one number are spread by their bytes: if all slots
    were taken in turn, each step would write its large ones, those of an embedding and of a head,
    to one disk and the next step to another.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._placed: dict[Path, dict[int, int]] = {}
        """Bytes by disk and number."""

    def next_disk(self, number: int, size_bytes: int) -> Path:
        """Return the disk with the least of the slots of this number; of equal ones of all slots.

        The slot counts as placed there.
        """

        def taken(disk: Path) -> tuple[int, int]:
            own = self._placed.get(disk, {})
            return own.get(number, 0), sum(own.values())

        disk = min(self._paths, key=taken)
        self.add(disk, number, size_bytes)
        return disk

    def add(self, disk: Path, number: int, size_bytes: int) -> None:
        """Count a slot that lies on a disk."""
        own = self._placed.setdefault(disk, {})
        own[number] = own.get(number, 0) + size_bytes


class SlotDisks:
    """Spreads slots over the disks of `paths`; without any they lie in `RUN/slots`.

    On such a disk they lie in `PATH/swaptrain-slots/RUN`, to which `RUN/slots/ID` is a link.
    """

    def __init__(self, run_dir: Path, paths: Sequence[Path]) -> None:
        self.run_dir = run_dir
        self._slots = RunPaths(run_dir).slots
        self.paths = tuple(path.absolute() for path in paths)
        self._spread = SlotSpread(self.paths)

    def flush(self) -> None:
        """Make all that was written to the slots durable."""
        token = run_token(self.run_dir)
        for folder in (self._slots, *(disk / POOL / token for disk in self.paths)):
            if folder.exists():
                flush_file_system(folder)

    def mend_links(self) -> None:
        """Point links to what was moved; to be done before any slot is read or deleted."""
        for link in sorted((self._slots).glob("*")):
            if link.is_symlink():
                self._check_link(link)

    def place(self, path: Path, size_bytes: int) -> None:
        """Make sure that `path` exists: a directory, or a link to one on the disk of `SlotSpread`.

        Called for every slot of a run in the order of their creation.
        """
        number = int(path.name.rpartition("-")[2])
        if path.is_symlink() and path.is_dir():
            self._spread.add(Path(os.readlink(path)).parents[2], number, size_bytes)
        if path.is_dir() or not self.paths:
            return
        disk = self._spread.next_disk(number, size_bytes)
        target = disk / POOL / run_token(self.run_dir) / path.name
        make_directory(target)
        with disk_errors(path, "make the link"):
            path.symlink_to(target)

    def _check_link(self, path: Path) -> None:
        """Let a slot be this run's own folder on another disk, where it is now, or refuse it."""
        token, target = run_token(self.run_dir), Path(os.readlink(path))
        if target.parent.name == token and target.is_dir():
            return
        for disk in self.paths:  # the disk, or the run with its folder there, was moved
            found = disk / POOL / token / path.name
            if found.is_dir() and not found.is_symlink():
                replace_link(path, str(found))
                return
        if target.parent.name == token:
            raise RunError(
                f"the slot {path} lies in {target}, which is not there: bring its disk back (if it "
                "is mounted elsewhere now, name that place in store.paths), or start over with "
                "--fresh"
            )
        raise ConfigError(
            f"the slot {path} lies in {target}, which is not a folder of this run. If the run was "
            f"moved here with all that it has, rename {target.parent} to "
            f"{target.parent.with_name(token)} and name its disk in store.paths; a copy needs the "
            "slots of its own"
        )

    def delete_unlinked(self) -> None:
        """Delete what lies on other disks without a link: a crash came between the two.

        Flushed, so that what is made there next is new, whatever becomes of this. Raises RunError
        where it is another run's.
        """
        for disk in self.paths:
            pool = disk / POOL / run_token(self.run_dir)
            self._claim(pool)
            lost = [path for path in pool.glob("*") if not self._links_to(path)]
            for path in lost:
                shutil.rmtree(path)
            if lost:
                flush_file_system(pool)

    def _claim(self, pool: Path) -> None:
        """Let a folder on another disk be this run's, or refuse one that another run left there.

        Its name depends on the run's path: a run that begins where another one was, which has been
        moved or deleted, finds that one's folder, and would delete its slots. So a file beside the
        folder says whose it is, durably before anything is in it; a run that moves keeps its id.
        """
        own = self._run_id()
        owner = pool.with_name(pool.name + ".owner")
        with disk_errors(owner, "read"):
            if owner.exists() and owner.read_bytes() == own:
                return
            occupied = pool.is_dir() and any(pool.iterdir())
        if occupied and not any(self._links_to(path) for path in pool.iterdir()):
            raise RunError(
                f"{pool} holds slots of another run, which was in {self.run_dir} before. If that "
                "run was moved, rename the folder as its own command says; if it was deleted, "
                "delete the folder too; then run the same command again"
            )
        make_directory(pool.parent)
        write_aside(owner, own)

    def _run_id(self) -> bytes:
        path = RunPaths(self.run_dir).run_id
        if not path.exists():
            write_aside(path, f"{secrets.token_hex(16)}\n".encode())
        with disk_errors(path, "read"):
            return path.read_bytes()

    def _links_to(self, target: Path) -> bool:
        return (self._slots / target.name).resolve() == target.resolve()


def run_token(run_dir: Path) -> str:
    """Return the name of a run's folder on other disks: readable, and its own.

    It depends on the run's path, so that neither a copy of a run nor a run of somebody else writes
    into this one's slots.
    """
    path = run_dir.resolve()
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return f"{path.name}-{digest}"


def delete_slots(run_dir: Path, paths: Sequence[Path]) -> None:
    """Delete slots, on other disks too where they are in this run's own folder there.

    A link is durably gone before what it points to goes.
    """
    doomed = []
    links = [path for path in paths if path.is_symlink()]
    for path in paths:
        target = Path(os.readlink(path)) if path.is_symlink() else path
        own = is_pool_link(str(target), path.name) and target.parent.name == run_token(run_dir)
        if target == path or own:
            doomed.append(target)
    for link in links:
        link.unlink()
    if links:
        flush_directory(links[0].parent)
    for path in doomed:
        if path.exists():
            shutil.rmtree(path)
