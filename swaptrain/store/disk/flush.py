"""Makes what was written durable on every file system, also on those that do not pass syncfs on."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["file_system_type", "flush_tree", "syncfs_reaches_disk"]

_FLUSHED_BY_SYNCFS = {
    0x0000EF53: "ext2, ext3, ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
}
"""File systems, by their type, whose syncfs waits until everything is on the disk.

FUSE, and some file systems of a network, do not pass the call on to who holds the bytes.
"""


def file_system_type(path: Path) -> int | None:
    """Return the number that statfs gives the file system of a path that exists, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    # struct statfs begins with the type, a long, on every 64-bit Linux; 256 bytes hold all of it.
    status = (ctypes.c_long * 32)()
    if not hasattr(libc, "statfs") or libc.statfs(os.fsencode(path), ctypes.byref(status)):
        return None
    return int(status[0]) & 0xFFFFFFFF


def syncfs_reaches_disk(path: Path) -> bool:
    """Whether one syncfs makes all that was written to the file system of `path` durable."""
    return hasattr(ctypes.CDLL(None), "syncfs") and file_system_type(path) in _FLUSHED_BY_SYNCFS


def flush_tree(path: Path) -> None:
    """Flush every file below `path`, then its directories from the bottom up; raises OSError.

    A name is durable only once its directory is, so a file comes before its directory, and a
    directory before the one above it: `path` itself, and those above it on the same disk, where a
    name may be new too. Links are names, and where they lead is not followed.
    """
    for folder, _, names in os.walk(path, topdown=False, onerror=_raise):
        for name in names:
            file = os.path.join(folder, name)
            with suppress(FileNotFoundError):  # deleted meanwhile: there is nothing to flush
                if stat.S_ISREG(os.lstat(file).st_mode):
                    _flush(file, os.O_RDONLY)
        _flush(folder, os.O_RDONLY | os.O_DIRECTORY)
    for parent in _parents(path):
        _flush(str(parent), os.O_RDONLY | os.O_DIRECTORY)


def _parents(path: Path) -> Iterator[Path]:
    """Yield the directories above `path` in which this user may have made a name, lowest first."""
    path = path.resolve()
    device = path.stat().st_dev
    for parent in path.parents:
        if parent.stat().st_dev != device or not os.access(parent, os.R_OK | os.W_OK):
            return
        yield parent


def _flush(path: str, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
