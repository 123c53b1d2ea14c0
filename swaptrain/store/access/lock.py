"""One writer per run: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from swaptrain.errors import RunError
from swaptrain.store.disk.durable_files import flush_directory, make_directory, run_error
from swaptrain.store.paths import RunPaths

__all__ = ["LockOwner", "RunLock", "boot_id", "is_held_by_this_thread", "is_lock_file"]
__all__ += ["is_named", "lock_owner", "open_lock_file", "owner_text", "read_owner", "try_lock"]

_TEXT_BYTES = 256
"""The text is padded to this, so that writing it needs no room on a disk that is full."""
_RELEASED = "released"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_TRIES, _PAUSE_S = 20, 0.02
"""How often the lock is asked for: who only looks whether it is held has it for a moment."""

_open_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


@dataclass(frozen=True)
class LockOwner:
    """What the text of a lock file says of the process that holds or held it."""

    pid: int | None = None
    host: str | None = None
    boot: str | None = None
    """The boot id of the kernel."""

    def __str__(self) -> str:
        """Return pid and host, as messages show them."""
        if self.pid is None:
            return "unknown"
        return f"pid {self.pid}" + (f", host {self.host}" if self.host else "")

    @property
    def is_other_kernel(self) -> bool:
        """Whether it ran under another kernel than this one: another machine, or another boot."""
        return self.boot is not None and self.boot != boot_id()


class RunLock:
    """Holds `RUN/lock` by flock until it is closed; the file says who: pid, host, boot id.

    The directory is locked with it, for the case that somebody deletes the file meanwhile.
    A lock whose holder died, on whatever machine, is taken over; `note` hears of it when the
    holder was on another host, whose locks the kernel here may not know. What is there under the
    name and cannot be a lock file of this run (a link, an empty directory) is replaced. Raises
    RunError, naming the holder, when another process has it.
    """

    def __init__(self, run_dir: Path, *, note: Callable[[str], None] = lambda _: None) -> None:
        self._path = RunPaths(run_dir.absolute()).lock
        self._thread = threading.get_ident()
        self._made = [p for p in (self._path, *self._path.parents) if not p.exists()]
        self._foreign = self._written()
        """Names of a run's that were there before."""
        self._descriptor = self._directory = -1
        make_directory(self._path.parent)
        held = False
        for _ in range(_TRIES):
            self._descriptor = open_lock_file(self._path)
            try:
                held = _flock(self._descriptor, self._path, run_dir, note)
            except BaseException:
                self.close()
                raise
            if held and is_named(self._descriptor, self._path):
                break
            if not held:
                time.sleep(_PAUSE_S)
            held = False  # another process has just removed this file: it is not the lock any more
            owner = read_owner(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        if not held:
            raise RunError(
                f"{run_dir} is in use by another process ({owner}): wait until it ends, or stop it"
            )
        _open_locks.add(self)
        self._hold_directory(run_dir)
        if self._path in self._made:
            self._flush_name()
        self._sign(run_dir, note)

    def close(self) -> None:
        """Release the lock; the file stays. Doing it twice does no harm."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def withdraw(self) -> None:
        """Remove the file and the directories that this lock made, as far as they are empty.

        For a command that is refused before it has written anything. Where it has, the lock stays:
        by that the directory is a run's.
        """
        if self._written() - self._foreign:
            return
        for path in self._made:
            if not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            try:
                path.rmdir()
            except FileNotFoundError:
                continue  # another rank of the run, that withdraws too
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                break

    def _written(self) -> set[Path]:
        paths = RunPaths(self._path.parent)
        return {path for path in (*paths.files, *paths.folders) if os.path.lexists(path)}

    def _hold_directory(self, run_dir: Path) -> None:
        """Lock the directory too: somebody may delete the file while its holder goes on."""
        try:
            self._directory = os.open(
                self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )
            for _ in range(_TRIES):
                if try_lock(self._directory):
                    return
                time.sleep(_PAUSE_S)  # the kernel may let go of the file of a killed one first
        except OSError:
            return  # a directory that cannot be locked: the file is, or `_flock` has said so
        self.withdraw()
        self.close()
        raise RunError(
            f"{run_dir} is in use by another process, whose lock file somebody has deleted, or "
            "which holds a lock on the directory itself (flock): wait until it ends, or stop it"
        )

    def _flush_name(self) -> None:
        """Make the file durable before anything else is there: a directory with it is a run's."""
        try:
            flush_directory(self._path.parent)
        except RunError:
            self.close()
            raise

    def _sign(self, run_dir: Path, note: Callable[[str], None]) -> None:
        """Write who holds the lock, over who held it and did not say that it let go."""
        before = read_owner(self._descriptor)
        if before.is_other_kernel and before.host != socket.gethostname():
            note(
                f"{run_dir} was last locked by {before}, which never released it: taken over. If "
                "that process still runs, on a network file system that locks per host, stop this "
                "one now"
            )
        try:
            _write_text(self._descriptor, owner_text())
        except OSError as error:
            self.close()
            raise run_error(error, self._path, "write", _TEXT_BYTES) from error

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor >= 0:
            try:
                _write_text(self._descriptor, _RELEASED)
            except OSError:
                self.close()  # the disk is gone; the text only spares the next owner a note
        self.close()


def is_held_by_this_thread(run_dir: Path) -> bool:
    """Whether this thread has the run open for writing: it would wait for itself."""
    path = RunPaths(run_dir).lock
    return any(
        lock._thread == threading.get_ident()
        and lock._descriptor >= 0
        and is_named(lock._descriptor, path)
        for lock in list(_open_locks)
    )


def lock_owner(run_dir: Path) -> LockOwner | None:
    """Return who has the run open for writing; None where nobody has.

    Nothing is written and nobody is kept waiting: the lock is asked for, shared, for a moment, and
    who wants it asks more than once.
    """
    path = RunPaths(run_dir).lock
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return read_owner(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise run_error(error, path, "lock") from error
        owner = read_owner(descriptor)
        return owner if _is_alive(owner) else None
    finally:
        os.close(descriptor)


def is_lock_file(path: Path) -> bool:
    """Whether a file is one that a lock has written, or has made and not written yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        # Zeros are what a power failure leaves that came before its text.
        text = os.pread(descriptor, _TEXT_BYTES + 1, 0).strip(b" \n\0").decode(errors="replace")
        return text in ("", _RELEASED) or read_owner(descriptor).pid is not None
    except OSError:
        return False
    finally:
        os.close(descriptor)


def owner_text() -> str:
    """Return what a lock file says while this process holds it."""
    return f"pid {os.getpid()}\nhost {socket.gethostname()}\nboot {boot_id()}\n"


def try_lock(descriptor: int) -> bool:
    """Take an exclusive flock if nobody has one; say whether. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        raise
    return True


def open_lock_file(path: Path) -> int:
    """Open a regular file of that name, made if it is missing, in place of what cannot be one."""
    # Not followed and not waited for: a link would lead out of the run, a pipe would block. The
    # descriptor is not inherited by programs that this process starts.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno not in {errno.ELOOP, errno.ENXIO}:
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        path.unlink()
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise run_error(error, path, "open") from error


def _flock(descriptor: int, path: Path, run_dir: Path, note: Callable[[str], None]) -> bool:
    """Take the lock if it is free; say whether. Where there are no locks, go by the text."""
    try:
        return try_lock(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise run_error(error, path, "lock") from error
        if _is_alive(read_owner(descriptor)):
            return False
        note(
            f"the file system of {run_dir} has no locks: a second process that trains there from "
            "another machine would not be noticed"
        )
        return True


def is_named(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that the name leads to."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


def _is_alive(owner: LockOwner) -> bool:
    """Whether a process of that pid runs here, if it was here that the lock was taken."""
    if owner.pid is None or owner.is_other_kernel or owner.pid == os.getpid():
        return False
    return Path(f"/proc/{owner.pid}").exists()


def read_owner(descriptor: int) -> LockOwner:
    """Return what a lock file says; what is not as written by `owner_text` says nothing."""
    words: dict[str, str] = {}
    try:
        text = os.pread(descriptor, _TEXT_BYTES, 0).decode(errors="replace")
    except OSError:
        return LockOwner()  # a pipe, a directory
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if value.isprintable():
            words[name] = value.strip()[:100]
    pid = words.get("pid", "")
    return LockOwner(
        int(pid) if pid.isascii() and pid.isdigit() else None, words.get("host"), words.get("boot")
    )


def _write_text(descriptor: int, text: str) -> None:
    os.pwrite(descriptor, text.encode().ljust(_TEXT_BYTES - 1) + b"\n", 0)
    if os.fstat(descriptor).st_size != _TEXT_BYTES:
        os.ftruncate(descriptor, _TEXT_BYTES)


def boot_id() -> str:
    """Return what tells this boot of this machine's kernel from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _let_go_in_child() -> None:
    # A forked child, such as a worker of a data set, would hold the lock for as long as it lives.
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)
