"""Files that are durable: flushed themselves, and their names in flushed directories."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from swaptrain.errors import RunError
from swaptrain.units import format_size

__all__ = ["allocate", "drop_cached", "existing_parent", "flush_directory", "flush_file"]
__all__ += [
    "flush_file_system",
    "free_bytes",
    "make_directory",
    "replace_link",
    "run_error",
    "write_aside",
]


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest directory above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write to the file system of `path`."""
    status = os.statvfs(existing_parent(path))
    return status.f_bavail * status.f_frsize


def run_error(error: OSError, path: Path, what: str, needed_bytes: int = 0) -> RunError:
    """Put an operating system's error in words: what failed, where, what was needed and is free."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    text = f"cannot {what} {path}: {reason}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        text += (
            f"; {format_size(needed_bytes)} were needed, {format_size(free_bytes(path))} are free: "
            "make room, then run the same command again"
        )
    elif error.errno == errno.EIO:
        text += ": the disk reports an error; check it, then run the same command again"
    return RunError(text)


def flush_file(path: Path) -> None:
    """Make a file's bytes durable (fdatasync)."""
    _flush(path, os.O_RDONLY, os.fdatasync)


def drop_cached(path: Path) -> None:
    """Let the next read of a file come from the disk; what is not written yet stays cached."""
    _flush(path, os.O_RDONLY, lambda f: os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED))


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable (fsync)."""
    _flush(path, os.O_RDONLY | os.O_DIRECTORY, os.fsync)


def flush_file_system(path: Path) -> None:
    """Make everything durable that was written to the file system of `path` (syncfs).

    One call for thousands of files, each of which would wait for the disk by itself. Where the C
    library lacks syncfs, every file and directory below `path` is flushed. Raises RunError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):
        _flush_tree(path)
        return

    def flush(descriptor: int) -> None:
        if libc.syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    _flush(path, os.O_RDONLY, flush)


def _flush_tree(path: Path) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for file in files:
            _flush(Path(folder, file), os.O_RDONLY, os.fsync)
        flush_directory(Path(folder))


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing; their names are durable."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise run_error(error, directory, "make the directory") from error
        flush_directory(directory.parent)


def write_aside(path: Path, content: bytes) -> None:
    """Write a whole small file so that a crash leaves the old or the new one, durably."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise run_error(error, path, "write", len(content)) from error
    flush_directory(path.parent)


def replace_link(link: Path, target: str) -> None:
    """Point a symlink elsewhere in one step, durably: symlink aside, rename over, fsync."""
    aside = link.with_name(link.name + ".next")
    try:
        aside.unlink(missing_ok=True)
        aside.symlink_to(target)
        aside.replace(link)
    except OSError as error:
        raise run_error(error, link, "switch") from error
    flush_directory(link.parent)


def allocate(path: Path, size_bytes: int) -> None:
    """Make a file of `size_bytes` whose space is reserved; one that exists keeps its bytes.

    Neither the file nor its name is flushed. Raises RunError, with the bytes free, when there is no
    room.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(descriptor).st_size > size_bytes:
                raise RunError(
                    f"{path} has another size than {size_bytes} bytes: is it of another run? "
                    "Start over with --fresh"
                )
            os.posix_fallocate(descriptor, 0, size_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise run_error(error, path, "reserve", size_bytes) from error


def _flush(path: Path, flags: int, flush: Callable[[int], None]) -> None:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            flush(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise run_error(error, path, "flush") from error
