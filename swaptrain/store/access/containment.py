"""A run directory leads nowhere else: no link in it is followed that swaptrain did not make.

A run may come from somebody else. A link in it to a home directory would otherwise be read into an
export, overwritten by a commit, or deleted by `--fresh`; a pipe would be waited for.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.store.disk.durable_files import run_error
from swaptrain.store.paths import LINKS, NEXT, POOL_LINK

__all__ = ["POOL", "check_contained", "is_pool_link"]

POOL = "swaptrain-slots"
"""The folder on each of `store.paths` that holds the slots of all runs, each in its own folder."""

_LINKS = [(re.compile(place), re.compile(target)) for place, target in LINKS]
_POOL_LINK = re.compile(POOL_LINK)


def check_contained(run_dir: Path) -> None:
    """Raise DamagedStoreError for any link, pipe or device in a run that is not swaptrain's own.

    Looks at every name in the directory, and at the slots on other disks; reads no file. Those of a
    disk that is not there are passed over. Whether a slot on another disk is this run's own is for
    `Slots` to say, before it writes there. Raises RunError when the directory cannot be read.
    """
    for entry in _entries(run_dir):
        place = os.path.relpath(entry.path, run_dir)
        if entry.is_symlink():
            _check_link(Path(entry.path), place)
        elif not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            raise DamagedStoreError(
                "a run directory holds something that is neither a file nor a directory",
                path=Path(entry.path),
            )


def is_pool_link(target: str, name: str) -> bool:
    """Whether a link's text has the form DISK/swaptrain-slots/RUN/NAME, in plain steps."""
    parts = target.split("/")
    return (
        target.startswith("/")
        and len(parts) >= 4
        and parts[-1] == name
        and parts[-3] == POOL
        and not {"", ".", ".."} & set(parts[1:])
    )


def _check_link(path: Path, place: str) -> None:
    try:
        target = os.readlink(path)
    except FileNotFoundError:
        return  # a running process has just renamed it
    if any(name.fullmatch(place) and to.fullmatch(target) for name, to in _LINKS):
        return
    if _POOL_LINK.fullmatch(place) and is_pool_link(target, path.name.removesuffix(NEXT)):
        _check_pool_slot(Path(target))
        return
    raise DamagedStoreError(
        f"a run directory holds a link that swaptrain did not make, to {target!r}: remove it, or do"
        " not use this run",
        path=path,
    )


def _check_pool_slot(slot: Path) -> None:
    """Check a slot on another disk: nothing below the pool's folder is a link."""
    for path in (slot.parent.parent, slot.parent, slot):
        try:
            mode = path.lstat().st_mode
        except OSError:
            return  # its disk is not there: who needs the slot says so
        if not stat.S_ISDIR(mode):
            raise DamagedStoreError("a slot on another disk is not a directory", path=path)
    for entry in _entries(slot):
        if entry.is_symlink() or not (
            entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
        ):
            raise DamagedStoreError("a slot holds a link or a pipe", path=Path(entry.path))


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a directory, links as themselves; what vanishes is passed over."""
    folders = [str(directory)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise run_error(error, Path(folder), "read") from error
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
