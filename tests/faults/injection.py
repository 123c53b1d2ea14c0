"""A layer under every disk operation of a process: counts them, and lets one of them fail.

Installed in a forked child, it replaces the functions of `os` that touch the disk, and Python's own
files by those of `_pyio`, which do their work through `os`. Only what happens below the run's own
directories counts. Flushing takes no time: nothing here loses power.
"""

from __future__ import annotations

import _pyio
import builtins
import errno
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.store.disk import durable_files as files

__all__ = ["COUNTED", "READS", "WRITES", "Fault", "Injector"]

READS = ("preadv", "pread", "read")
WRITES = ("pwritev", "pwrite", "write")
_FLUSHES = ("fsync", "fdatasync", "syncfs")
_TWO_NAMES = ("symlink", "replace", "rename")  # the second one is what is made
_CHANGES = ("mkdir", "unlink", "rmdir", "ftruncate", "posix_fallocate")
_LOOKS = ("open", "statvfs", "scandir", "listdir", "readlink")
_UNCOUNTED = ("stat", "lstat")  # a disk that is gone does not answer them either
COUNTED = (*READS, *WRITES, *_FLUSHES, *_TWO_NAMES, *_CHANGES, *_LOOKS)

_LASTING: dict[str, tuple[str, ...]] = {
    # Chunks and records are reserved, so that pwritev and pwrite go on when a disk is full.
    "ENOSPC": ("write", "mkdir", "symlink", "posix_fallocate"),
    "EROFS": (*WRITES, *_TWO_NAMES, *_CHANGES),
    "ENODEV": (*COUNTED, *_UNCOUNTED),
}
"""Which operations fail for good on a disk that is full, read-only or gone."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in the operation `name` with number `at`, from 1.

    `kind`: the name of an errno; `short` (a part is moved, and said to be); `torn` (a part is
    written, then the error EIO); `full` (a part is written, then the disk is full); `flip` (one bit
    of what is moved differs); `slow` (a fifth of a second). `lasting`, for the errnos of `_LASTING`
    and for `full`: every later operation that can fail so fails too.
    """

    name: str
    at: int
    kind: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{' for good' if self.lasting else ''} at {self.name} {self.at}"


class Injector:
    """Watches the operations below `roots`, from its making on; `fault` None only counts them."""

    def __init__(self, roots: Sequence[Path], fault: Fault | None, *, delay_s: float = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.hit: str | None = None
        """The path of the operation that failed."""
        self._roots = tuple(f"{root.absolute()}/" for root in roots)
        self._fault, self._delay_s = fault, delay_s
        self._lock = threading.Lock()
        names = [name for name in (*COUNTED, *_UNCOUNTED) if name != "syncfs"]
        self._original = {name: getattr(os, name) for name in names}
        self._original["syncfs"] = lambda _: None
        io.open = builtins.open = _pyio.open  # type: ignore[assignment]
        for name in names:
            setattr(os, name, self._watched(name))
        files.syncfs = self._watched("syncfs")

    def end(self) -> None:
        """Let everything pass from now on."""
        self._fault, self._roots = None, ()

    def _watched(self, name: str) -> Callable[..., Any]:
        original = self._original[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            path = self._path(name, args, kwargs)
            if path is None:
                return original(*args, **kwargs)
            kind = self._count(name, path)
            if kind is None:
                if self._delay_s:
                    time.sleep(self._delay_s * (hash((name, self.counts[name])) % 5))
                return None if name in _FLUSHES else original(*args, **kwargs)
            return self._spoil(kind, name, path, args, kwargs)

        return call

    def _path(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the path that an operation is on, if it lies below one of the roots."""
        if not self._roots:
            return None
        of = args[1] if name in _TWO_NAMES else args[0] if args else kwargs.get("path", ".")
        if isinstance(of, int):
            path = self._target(of)
        else:
            path = os.fsdecode(of)
            if kwargs.get("dir_fd") is not None:
                path = f"{self._target(kwargs['dir_fd'])}/{path}"
        path = os.path.abspath(path)
        return path if f"{path}/".startswith(self._roots) else None

    def _target(self, descriptor: int) -> str:
        try:
            return str(self._original["readlink"](f"/proc/self/fd/{descriptor}"))
        except OSError:
            return "/"

    def _count(self, name: str, path: str) -> str | None:
        """Count an operation; return how it is to fail, if it is."""
        with self._lock:
            if name not in _UNCOUNTED:
                self.counts[name] += 1
            fault = self._fault
            if fault is None:
                return None
            if self.hit is None and name == fault.name and self.counts[name] == fault.at:
                self.hit = path
                return fault.kind
            if self.hit is None or not fault.lasting:
                return None
            kind = "ENOSPC" if fault.kind == "full" else fault.kind
            return kind if name in _LASTING[kind] else None

    def _spoil(
        self, kind: str, name: str, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        match kind:
            case "slow":
                time.sleep(0.2)
                return None if name in _FLUSHES else self._original[name](*args, **kwargs)
            case "short" | "full":
                return self._partly(name, args)
            case "torn":
                self._partly(name, args)
                raise _error("EIO", path)
            case "flip":
                return self._flipped(name, args)
        raise _error(kind, path)

    def _partly(self, name: str, args: tuple[Any, ...]) -> Any:
        """Move the first third of what is asked for; return how much, or what, that was."""
        original = self._original[name]
        if name.endswith("v"):
            descriptor, (buffer,), offset = args
            pages = max(1, len(buffer) // 3 // 4096) * 4096
            return original(descriptor, [memoryview(buffer)[:pages]], offset)
        if name in READS:
            return original(args[0], max(1, args[1] // 3), *args[2:])
        return original(args[0], memoryview(args[1])[: max(1, len(args[1]) // 3)], *args[2:])

    def _flipped(self, name: str, args: tuple[Any, ...]) -> Any:
        """Move everything, one bit in the middle wrong; what is written from stays as it is."""
        original = self._original[name]
        if name == "preadv":
            moved = original(*args)
            if moved:
                memoryview(args[1][0])[moved // 2] ^= 1
            return moved
        if name in READS:
            return _with_flip(original(*args))
        if name == "pwritev":
            # Direct I/O needs its alignment: all of it right first, then one byte wrong.
            moved = original(*args)
            middle = len(args[1][0]) // 2
            byte = _with_flip(bytes(args[1][0][middle : middle + 1]))
            other = self._original["open"](f"/proc/self/fd/{args[0]}", os.O_WRONLY)
            self._original["pwrite"](other, byte, args[2] + middle)
            os.close(other)
            return moved
        return original(args[0], _with_flip(bytes(args[1])), *args[2:])


def _error(kind: str, path: str) -> OSError:
    code = getattr(errno, kind)
    return OSError(code, os.strerror(code), path)


def _with_flip(content: bytes) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)
