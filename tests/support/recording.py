"""Records what this process does to chosen directories: every call that changes files, in order.

Python's own doors to the disk are replaced (os, open, the C library's syncfs); contents are kept.
`tests/support/recording_strace.py` proves that nothing else writes. Meant for a forked child.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Event", "Recorder"]

_FICLONE = 0x40049409
_KEEP_SIZE = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One change of the disk, one end of a flush, or something that the run was told is done.

    Paths are physical: no part of them is a symlink.
    """

    kind: str
    """create, mkdir, symlink, link, rename, unlink, rmdir; write, truncate, allocate; begin, end;
    mark."""
    path: str = ""
    other: str = ""
    """The target of a symlink; where a rename or a link goes; which flush: fsync, ..."""
    offset: int = 0
    """Of a write; the size for truncate and allocate; the number of a flush."""
    data: bytes = b""
    mark: tuple[Any, ...] = ()


class Recorder:
    """Writes down the calls of all threads below `roots`, each of which stands for one disk.

    Changes are atomic (a lock is held during each), flushes are not: other threads go on between
    their two ends. Flushes are only written down, unless `flush`: a test needs no real disk.
    """

    def __init__(self, roots: Sequence[Path], *, flush: bool = False) -> None:
        self.events: list[Event] = []
        self.tally: Counter[tuple[str, str]] = Counter()
        """Calls by kind and path, as strace would see them."""
        self._roots = [os.path.realpath(root) for root in roots]
        self._flush = flush
        self._flushes = 0
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in (*_NAMES, "lstat", "lseek", "readlink")}

    def install(self) -> None:
        """Replace the doors, for the rest of this process's life."""
        for name in _NAMES:
            setattr(os, name, getattr(self, f"_{name}"))
        self._real_open = io.open
        io.open = builtins.open = self._builtin_open  # type: ignore[assignment]
        self._real_ioctl = fcntl.ioctl
        fcntl.ioctl = self._ioctl
        Path.stat = lambda path, **how: self._stat(path, **how)  # type: ignore[method-assign]
        library = ctypes.CDLL
        ctypes.CDLL = lambda *a, **k: _Library(library(*a, **k), self)  # type: ignore[assignment,misc]

    def mark(self, *what: Any) -> None:
        """Write down that the run was told that something is done."""
        with self._lock:
            self.events.append(Event("mark", mark=what))

    # What a path or a descriptor means

    def _below(self, path: str) -> bool:
        return any(path == root or path.startswith(root + "/") for root in self._roots)

    def _place(self, path: Any, dir_fd: int | None = None, *, follow: bool = False) -> str | None:
        """Return the physical path below the roots, else None."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(self._real["readlink"](f"/proc/self/fd/{dir_fd}"), text)
        if follow:
            place = os.path.realpath(text)
        else:
            folder, name = os.path.split(os.path.abspath(text))
            place = os.path.join(os.path.realpath(folder), name)
        return place if self._below(place) else None

    def _place_of(self, descriptor: Any) -> str | None:
        """Return the path that an open file has now; None for one that was deleted."""
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        place: str = self._real["readlink"](f"/proc/self/fd/{number}")
        return place if self._below(place) and not place.endswith(" (deleted)") else None

    def _log(self, kind: str, path: str, other: str = "", offset: int = 0, data: Any = b"") -> None:
        self.events.append(Event(kind, path, other, offset, bytes(data)))

    # Names

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        with self._lock:
            place = self._place(path, dir_fd, follow=True)
            size = self._size(place)
            descriptor = int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
            if place is not None:
                self.tally["open", place] += 1
                if size is None:
                    self._log("create", place)
                elif size and flags & os.O_TRUNC:
                    self._log("truncate", place)
            return descriptor

    def _size(self, place: str | None) -> int | None:
        if place is None:
            return None
        try:
            return int(self._real["lstat"](place).st_size)
        except FileNotFoundError:
            return None

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._lock:
            place = self._place(path, dir_fd)
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            self._name("mkdir", place)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        with self._lock:
            place = self._place(path, dir_fd)
            self._real["unlink"](path, dir_fd=dir_fd)
            self._name("unlink", place)

    _remove = _unlink

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        with self._lock:
            place = self._place(path, dir_fd)
            self._real["rmdir"](path, dir_fd=dir_fd)
            self._name("rmdir", place)

    def _symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        with self._lock:
            place = self._place(dst, dir_fd)
            self._real["symlink"](src, dst, dir_fd=dir_fd)
            self._name("symlink", place, os.fsdecode(src))

    def _rename(self, src: Any, dst: Any, **where: Any) -> None:
        with self._lock:
            place = self._place(src, where.get("src_dir_fd"))
            target = self._place(dst, where.get("dst_dir_fd"))
            self._real["rename"](src, dst, **where)
            assert (place is None) == (target is None), f"{src} left the roots, or came into them"
            self._name("rename", place, target or "")

    _replace = _rename

    def _link(self, src: Any, dst: Any, **where: Any) -> None:
        with self._lock:
            place = self._place(src, where.get("src_dir_fd"))
            target = self._place(dst, where.get("dst_dir_fd"))
            self._real["link"](src, dst, **where)
            self._name("link", place, target or "")

    def _name(self, kind: str, place: str | None, other: str = "") -> None:
        if place is not None:
            self.tally[kind, place] += 1
            self._log(kind, place, other)

    # Contents

    @contextmanager
    def _changing(self, kind: str, descriptor: Any) -> Iterator[str | None]:
        with self._lock:
            place = self._place_of(descriptor)
            yield place
            if place is not None:
                self.tally[kind, place] += 1

    def _at(self, descriptor: int) -> int:
        """Return where the next write of a descriptor goes."""
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            return os.fstat(descriptor).st_size
        return int(self._real["lseek"](descriptor, 0, os.SEEK_CUR))

    def _write(self, descriptor: int, data: Any) -> int:
        with self._lock:
            place = self._place_of(descriptor)
            if place is not None:
                self.tally["write", place] += 1
                offset = self._at(descriptor)
                done = int(self._real["write"](descriptor, data))
                self._log("write", place, offset=offset, data=memoryview(data).cast("B")[:done])
                return done
        # Not under the lock: a pipe may be full.
        return int(self._real["write"](descriptor, data))

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        with self._changing("write", descriptor) as place:
            done = int(self._real["pwrite"](descriptor, data, offset))
            if place is not None:
                self._log("write", place, offset=offset, data=memoryview(data).cast("B")[:done])
            return done

    def _pwritev(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        with self._changing("write", descriptor) as place:
            done = int(self._real["pwritev"](descriptor, buffers, offset, flags))
            if place is not None:
                self._log("write", place, offset=offset, data=b"".join(buffers)[:done])
            return done

    def _writev(self, descriptor: int, buffers: Any) -> int:
        return self._write(descriptor, b"".join(buffers))

    def _sendfile(self, out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
        with self._changing("write", out_fd) as place:
            at = self._at(out_fd) if place is not None else 0
            done = int(self._real["sendfile"](out_fd, in_fd, offset, count))
            if place is not None and done:
                self._log("write", place, offset=at, data=self._read_back(place, at, done))
            return done

    def _copy_file_range(
        self, src: int, dst: int, count: int, offset_src: Any = None, offset_dst: Any = None
    ) -> int:
        with self._changing("write", dst) as place:
            at = offset_dst if offset_dst is not None or place is None else self._at(dst)
            done = int(self._real["copy_file_range"](src, dst, count, offset_src, offset_dst))
            if place is not None and done:
                self._log("write", place, offset=at, data=self._read_back(place, at, done))
            return done

    def _ioctl(self, descriptor: Any, request: int, *arguments: Any) -> Any:
        if request != _FICLONE:
            return self._real_ioctl(descriptor, request, *arguments)
        with self._changing("clone", descriptor) as place:
            result = self._real_ioctl(descriptor, request, *arguments)
            if place is not None:
                size = self._size(place) or 0
                self._log("write", place, data=self._read_back(place, 0, size))
            return result

    def _read_back(self, place: str, offset: int, count: int) -> bytes:
        with self._real_open(place, "rb") as file:
            file.seek(offset)
            content: bytes = file.read(count)
        return content

    def _ftruncate(self, descriptor: int, length: int) -> None:
        with self._changing("truncate", descriptor) as place:
            self._real["ftruncate"](descriptor, length)
            if place is not None:
                self._log("truncate", place, offset=length)

    def _truncate(self, path: Any, length: int) -> None:
        with self._lock:
            place = self._place(path, follow=True)
            self._real["truncate"](path, length)
            if place is not None:
                self.tally["truncate", place] += 1
                self._log("truncate", place, offset=length)

    def _posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        with self._changing("allocate", descriptor) as place:
            self._real["posix_fallocate"](descriptor, offset, length)
            if place is not None:
                self._log("allocate", place, offset=offset + length)

    # Flushes

    def _fsync(self, descriptor: Any) -> None:
        self._flushed("fsync", descriptor, self._real["fsync"])

    def _fdatasync(self, descriptor: Any) -> None:
        self._flushed("fdatasync", descriptor, self._real["fdatasync"])

    def syncfs(self, descriptor: int, real: Callable[[int], int]) -> int:
        """Stand in for the C library's syncfs."""
        self._flushed("syncfs", descriptor, real)
        return 0

    def fallocate(self, real: Callable[..., int], descriptor: Any, *arguments: Any) -> int:
        """Stand in for the C library's fallocate, of room behind the end: nothing can be read."""
        assert arguments[0].value == _KEEP_SIZE, "another use of fallocate would be lost"
        with self._changing("allocate", descriptor.value):
            return real(descriptor, *arguments)

    def _flushed(self, kind: str, descriptor: Any, real: Callable[[Any], Any]) -> None:
        with self._lock:
            place = self._place_of(descriptor)
            if place is None:
                return
            self._flushes += 1
            number = self._flushes
            self.tally[kind, place] += 1
            self._log("begin", place, kind, number)
        if self._flush:
            real(descriptor)
        else:
            time.sleep(0.0002)  # let other threads come between
        with self._lock:
            self._log("end", place, kind, number)

    # The disks

    def _stat(self, path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        """Stand in for Path.stat; os.stat, whose results are compared with fstat's, stays."""
        result = os.stat(path, follow_symlinks=follow_symlinks)
        return self._on_its_disk(result, self._place(path, follow=follow_symlinks))

    def _on_its_disk(self, result: os.stat_result, place: str | None) -> os.stat_result:
        """Return a status whose device is the root's number: each is a disk of its own."""
        if place is None or len(self._roots) == 1:
            return result
        device = next(n for n, root in enumerate(self._roots) if (place + "/").startswith(root))
        named = {
            name: getattr(result, name)
            for name in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns", "st_blocks", "st_blksize")
        }
        return os.stat_result((*result[:2], 10**6 + device, *result[3:10]), named)

    def _builtin_open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Open as the builtin does; what is written below the roots passes through os.write."""
        plain = not set(mode) & set("wax+")
        place = None
        if not plain:
            place = self._place_of(file) if isinstance(file, int) else self._place(file)
        if place is None:
            return self._real_open(
                file, mode, buffering, encoding, errors, newline, closefd, opener
            )
        assert "+" not in mode, "reading and writing one file object is not recorded"
        if opener is None and not isinstance(file, int):
            opener = _open_with_umask
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if "b" in mode and buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline)


def _open_with_umask(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666)


class _Raw(io.FileIO):
    """A file whose writes are seen."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        os.ftruncate(self.fileno(), length)
        return length


class _Library:
    """A C library whose flushes of whole file systems are seen; other flushes promise nothing."""

    def __init__(self, library: Any, recorder: Recorder) -> None:
        self._library, self._recorder = library, recorder

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name == "syncfs":
            return lambda descriptor: self._recorder.syncfs(descriptor, function)
        if name == "fallocate":
            return lambda *arguments: self._recorder.fallocate(function, *arguments)
        return function


_NAMES = (
    *("open", "mkdir", "unlink", "remove", "rmdir", "symlink", "rename", "replace", "link"),
    *("write", "pwrite", "pwritev", "writev", "sendfile", "copy_file_range"),
    *("ftruncate", "truncate", "posix_fallocate", "fsync", "fdatasync"),
)
