"""Anonymous memory whose pages can go from one mapping to another without being copied."""

from __future__ import annotations

import ctypes
import errno
import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAGE_BYTES", "Mapping", "kernel_calls", "touch"]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4  # the last one is Linux 5.7's
_MAP_FIXED, _MAP_FIXED_NOREPLACE = 0x10, 0x100000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MOST_PIECES = 64
"""Of one part of a mapping: the kernel counts each, and a process may have 65,530."""
_LEAST_MOVED_BYTES = 64 * 2**10
"""To make less resident takes no longer than to move it."""


@dataclass
class _Part:
    """Pages of one size in a mapping; resident are those from its beginning up to `end`."""

    begin: int
    """Offset in the mapping."""
    nbytes: int
    page_bytes: int
    pieces: list[int] = field(default_factory=list)
    """Bytes of what is resident and the kernel can move in one call, in order."""

    @property
    def end(self) -> int:
        return self.begin + sum(self.pieces)

    @property
    def missing_bytes(self) -> int:
        return self.begin + self.nbytes - self.end

    def cut(self, nbytes: int) -> None:
        """Take bytes off the last piece."""
        self.pieces[-1] -= nbytes
        if not self.pieces[-1]:
            self.pieces.pop()


class Mapping:
    """One anonymous mapping: huge pages as far as they fit, aligned to them, then small ones.

    Which pages it has is decided by `populate`, `take_pages` and `drop_pages`; it begins with none.
    """

    def __init__(self, nbytes: int) -> None:
        """Take addresses for `nbytes`, a multiple of 4096; raises OSError if there are none."""
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        huge = nbytes >= HUGE_PAGE_BYTES
        # The extra address range is never touched, so it costs no memory.
        self._memory = mmap.mmap(-1, nbytes + (HUGE_PAGE_BYTES if huge else 0), flags=flags)
        begin = int(np.frombuffer(self._memory, np.uint8, 1).ctypes.data)
        self._start = -begin % HUGE_PAGE_BYTES if huge else 0
        self.address = begin + self._start
        """Where the first byte is."""
        # Whole huge pages only: one that covers the end would be resident beyond `nbytes`.
        huge_bytes = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        with suppress(OSError):
            if huge:
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._start, huge_bytes)
            self._memory.madvise(mmap.MADV_NOHUGEPAGE, self._start + huge_bytes)
        self._huge = _Part(0, huge_bytes, HUGE_PAGE_BYTES)
        self._small = _Part(huge_bytes, nbytes - huge_bytes, PAGE_BYTES)
        self.resident_bytes = 0
        """Bytes of its pages."""
        self._is_patched = False
        """Whether pages came or went: its addresses are several areas of the kernel's then."""

    @property
    def is_resident(self) -> bool:
        """Whether it has all its pages."""
        return self.resident_bytes == self.nbytes

    def view(self) -> NDArray[np.uint8]:
        """Return the bytes as a new array, which every later view refers to."""
        return np.frombuffer(self._memory, np.uint8, self.nbytes, self._start)

    def keep_from_children(self) -> None:
        """Let no forked process have it, as what a device reads and writes itself must not be."""
        self._memory.madvise(mmap.MADV_DONTFORK)

    def populate(self) -> None:
        """Make what is missing resident; raises OSError when there is no memory for it."""
        for part in (self._huge, self._small):
            missing = part.missing_bytes
            if missing:
                if self._is_patched:
                    self._join(part)
                _populate(self._memory, self._start + part.end, missing)
                part.pieces.append(missing)
                self.resident_bytes += missing

    def take_pages(self, source: Mapping) -> bool:
        """Take over pages of `source`, with their content, as many as this one has place for.

        Not all, where they would come in more or smaller pieces than is worth while. False where
        the kernel moves no pages.
        """
        for own, other in (self._huge, source._huge), (self._small, source._small):
            while own.missing_bytes and other.pieces and len(own.pieces) < _MOST_PIECES:
                moved = min(own.missing_bytes, other.pieces[-1])
                if moved < _LEAST_MOVED_BYTES:
                    break
                begin = source.address + other.end - moved
                if not _move(begin, self.address + own.end, moved):
                    return False
                other.cut(moved)
                own.pieces.append(moved)
                source.resident_bytes -= moved
                self.resident_bytes += moved
                source._is_patched = self._is_patched = True
        return True

    def drop_pages(self, nbytes: int) -> None:
        """Give pages of at least `nbytes` back to the system, or all where it has fewer."""
        for part in (self._small, self._huge):
            while nbytes > 0 and part.pieces:
                whole = -(-nbytes // part.page_bytes) * part.page_bytes
                dropped = min(whole, part.pieces[-1])
                begin = self._start + part.end - dropped
                self._memory.madvise(mmap.MADV_DONTNEED, begin, dropped)
                part.cut(dropped)
                self.resident_bytes -= dropped
                nbytes -= dropped

    def shorten(self, nbytes: int) -> None:
        """End after `nbytes` from now on; the pages behind go back to the system.

        For mappings that are populated once: none may take pages of it, or drop some, afterwards.
        """
        self._memory.madvise(mmap.MADV_DONTNEED, self._start + nbytes, self.nbytes - nbytes)
        self.nbytes = self.resident_bytes = nbytes

    def _join(self, part: _Part) -> None:
        """Make one area of what is missing: the kernel keeps each that pages ever moved to."""
        calls = kernel_calls()
        if calls is None:
            return
        begin, nbytes = part.end, part.missing_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        calls.mmap(self.address + begin, nbytes, _READ_WRITE, flags, -1, 0)
        with suppress(OSError):
            advice = mmap.MADV_HUGEPAGE if part is self._huge else mmap.MADV_NOHUGEPAGE
            self._memory.madvise(advice, self._start + begin, nbytes)

    def close(self) -> None:
        """Unmap it; no view of it may be left (BufferError)."""
        self._memory.close()


def touch(nbytes: int) -> None:
    """Take `nbytes` of RAM and give them back: what would fail in the middle of a run fails now.

    Raises OSError when the kernel refuses.
    """
    mapping = Mapping(-(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    try:
        mapping.populate()
    finally:
        mapping.close()


def _move(source: int, target: int, nbytes: int) -> bool:
    """Move the pages behind one address to another; the source stays mapped, without pages.

    If it were unmapped, another thread's mapping could lie there when its owner unmaps it. False
    where the kernel does not do it.
    """
    calls = kernel_calls()
    if calls is None:
        return False
    how = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if calls.mremap(source, nbytes, nbytes, how, target) == target:
        return True
    # The target may have been unmapped before it failed: its owner must find it mapped.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    calls.mmap(target, nbytes, _READ_WRITE, flags, -1, 0)
    return False


@cache
def kernel_calls() -> ctypes.CDLL | None:
    """Return the C library, for mremap and mmap, where there is an mremap (Linux)."""
    process = ctypes.PyDLL(None)  # to let another thread run Python meanwhile takes twice as long
    if not hasattr(process, "mremap"):
        return None
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    process.mremap.argtypes = address, size, size, number, address
    process.mmap.argtypes = address, size, number, number, number, ctypes.c_long
    process.mremap.restype = process.mmap.restype = address
    return process


def _populate(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Make part of a mapping resident; raises OSError when there is no memory for it."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        np.frombuffer(memory, np.uint8, nbytes, start)[::PAGE_BYTES] = 0  # a kernel before 5.14
