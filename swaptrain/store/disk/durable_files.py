"""Files that are durable: flushed themselves, and their names in flushed directories."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swaptrain.errors import RunError
from swaptrain.store.disk.flush import flush_tree, syncfs_reaches_disk
from swaptrain.store.paths import ASIDE, NEXT
from swaptrain.units import format_size

__all__ = [
    "allocate",
    "allocate_blank",
    "disk_errors",
    "drop_cached",
    "existing_parent",
    "flush_directory",
]
__all__ += ["flush_file"]
__all__ += [
    "flush_file_system",
    "flush_file_systems",
    "free_bytes",
    "make_directory",
    "read_whole",
    "replace_link",
    "reserve_beyond",
    "run_error",
    "user_cache",
    "write_aside",
]


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def user_cache() -> Path:
    """Return the directory of what swaptrain knows of the machine, whatever the run.

    Raises OSError where the user has no home.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return Path(home) / "swaptrain"


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest directory above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write to the file system of `path`.

    None where the file system has no such figure: it says that it has 0 blocks in all.
    """
    status = os.statvfs(existing_parent(path))
    return status.f_bavail * status.f_frsize if status.f_blocks else None


_GONE = (errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN)
_ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within the quota, or have it raised",
    errno.EIO: "the disk reports an error (dmesg may say more): check it",
    errno.EROFS: "the file system cannot be written to (after an error the kernel makes it "
    "read-only, dmesg says so): check the disk and mount it for writing",
    errno.EACCES: "this user has no permission: give it",
    errno.EPERM: "this user has no permission: give it",
    errno.ENOENT: "it has been taken away, or its disk is not there: bring it back",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the machine has too many files open: close some",
    errno.ENOMEM: "the machine has no memory left: end other programs, or lower memory.host",
    **dict.fromkeys(_GONE, "its disk is not there any more: bring it back"),
}
_LEAST_BYTES = 4096  # what a name, a link or a line takes


def run_error(error: OSError, path: Path, what: str, needed_bytes: int = 0) -> RunError:
    """Put an operating system's error in words: what failed, where, and what to do.

    Where it is about space the text has the bytes needed and free, too.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    text = f"cannot {what} {path}: {reason}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        needed = format_size(max(needed_bytes, _LEAST_BYTES))
        text += f"; {needed} were needed, {_free_text(path)}"
    advice = _ADVICE.get(error.errno or 0, "look into it")
    text = f"{text}: {advice}, then run the same command again"
    return RunError(text, path=path, errno=error.errno)


def _free_text(path: Path) -> str:
    try:
        status = os.statvfs(existing_parent(path))
    except OSError:
        return "what is free cannot be found out"  # the error to report is the one before
    if not status.f_blocks:
        return "what is free is not known there"
    text = f"{format_size(status.f_bavail * status.f_frsize)} are free"
    # Some file systems make files as they go, and have no count of them.
    return text if status.f_favail or not status.f_files else f"{text}, but no more files"


@contextmanager
def disk_errors(path: Path, what: str, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError of the block into a RunError that says what could not be done with `path`.

    Where the error itself names a file, that one is named.
    """
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename
        raise run_error(
            error, Path(os.fsdecode(named)) if named else path, what, needed_bytes
        ) from error


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
    """Make everything durable that was written below `path`, and the names that lead to it.

    By one syncfs of its file system where that is known to reach the disk, since thousands of files
    would each wait for the disk by themselves. Elsewhere every file is flushed by itself: behind
    FUSE, and behind some networks, the call says that it is done and nothing is. Raises RunError.
    """
    if syncfs_reaches_disk(path):
        _flush(path, os.O_RDONLY, lambda descriptor: syncfs(descriptor))
        return
    with disk_errors(path, "flush"):
        flush_tree(path)


def flush_file_systems(paths: Iterable[Path]) -> None:
    """Make everything durable that was written below each of `paths`, each disk only once."""
    devices: set[int] = set()
    trees: list[Path] = []
    for path in paths:
        real, device = path.resolve(), path.stat().st_dev
        if syncfs_reaches_disk(path):
            done = device in devices
            devices.add(device)
        else:
            done = any(real.is_relative_to(tree) for tree in trees)
            trees.append(real)
        if not done:
            flush_file_system(real)


def syncfs(descriptor: int) -> None:
    """Flush the file system that holds an open file; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(descriptor):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing; their names are durable."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with disk_errors(directory, "make the directory"):
            directory.mkdir(exist_ok=True)
        flush_directory(directory.parent)


def read_whole(descriptor: int, count: int, offset: int) -> bytes:
    """Return `count` bytes of a file from `offset` on, fewer only where it ends; raises OSError."""
    content = b""
    while len(content) < count:
        piece = os.pread(descriptor, count - len(content), offset + len(content))
        if not piece:
            break
        content += piece
    return content


def write_aside(path: Path, content: bytes) -> None:
    """Write a whole small file so that a crash leaves the old or the new one, durably."""
    aside = path.with_name(path.name + ASIDE)
    with disk_errors(path, "write", len(content)):
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            # Before the rename. Were the name on the disk first, a power loss could leave an empty
            # file in the place of the old one, which is gone.
            os.fsync(file.fileno())
        aside.replace(path)
    flush_directory(path.parent)


def replace_link(link: Path, target: str) -> None:
    """Point a symlink elsewhere in one step, durably: symlink aside, rename over, fsync."""
    aside = link.with_name(link.name + NEXT)
    with disk_errors(link, "switch"):
        aside.unlink(missing_ok=True)
        aside.symlink_to(target)
        aside.replace(link)
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


def allocate_blank(path: Path, size_bytes: int) -> None:
    """Like `allocate`, and a new file holds blanks: a record that says nothing yet."""
    with disk_errors(path, "write", size_bytes):
        is_new = not path.exists()
        allocate(path, size_bytes)
        if is_new:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < size_bytes:
                    done += os.pwrite(descriptor, b" " * (size_bytes - done), done)
            finally:
                os.close(descriptor)


def reserve_beyond(descriptor: int, nbytes: int) -> None:
    """Reserve `nbytes` of disk behind the end of an open file, whose size stays as it is.

    What is appended later goes there. Does nothing where the file system, or the C library, has no
    such call. Raises OSError when there is no room.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not nbytes or not hasattr(libc, "fallocate"):
        return
    end = os.fstat(descriptor).st_size
    arguments = (ctypes.c_int64(end), ctypes.c_int64(nbytes))
    if libc.fallocate(ctypes.c_int(descriptor), ctypes.c_int(_KEEP_SIZE), *arguments):
        code = ctypes.get_errno()
        if code not in {errno.EOPNOTSUPP, errno.ENOSYS}:
            raise OSError(code, os.strerror(code))


def _flush(path: Path, flags: int, flush: Callable[[int], None]) -> None:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            flush(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise run_error(error, path, "flush") from error
