"""Anonymous memory whose huge pages can go from one mapping to another without being copied."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAGE_BYTES", "Mapping", "resident", "touch"]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4  # the last one is Linux 5.7's
_MAP_FIXED_NOREPLACE = 0x100000
_MOST_PIECES = 64
"""Of one mapping: the kernel counts each, and a process may have 65,530."""


class Mapping:
    """One anonymous mapping; aligned to huge pages if it has any. Not resident when it is made."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        huge = nbytes >= HUGE_PAGE_BYTES
        # The extra address range is never touched, so it costs no memory.
        self._memory = mmap.mmap(-1, nbytes + (HUGE_PAGE_BYTES if huge else 0), flags=flags)
        self._start = -self._address(0) % HUGE_PAGE_BYTES if huge else 0
        # Whole huge pages only: one that covers the end would be resident beyond `nbytes`.
        self._huge_bytes = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if huge:
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._start, self._huge_bytes)
                self._memory.madvise(mmap.MADV_NOHUGEPAGE, self._start + self._huge_bytes)
        self._pieces: list[tuple[int, int]] = []
        """Offset and bytes of what is resident and the kernel can move in one call, in order."""

    @property
    def address(self) -> int:
        """Where the first byte is."""
        return self._address(self._start)

    @property
    def movable_bytes(self) -> int:
        """Bytes of huge pages, which can go to another mapping."""
        return sum(nbytes for _, nbytes in self._pieces)

    def view(self) -> NDArray[np.uint8]:
        """Return the bytes as a new array, which every later view refers to."""
        return np.frombuffer(self._memory, np.uint8, self.nbytes, self._start)

    def populate(self) -> None:
        """Make what is not resident resident; raises OSError when there is no memory for it."""
        filled = self.movable_bytes
        if filled < self.nbytes:
            _populate(self._memory, self._start + filled, self.nbytes - filled)
        if filled < self._huge_bytes:
            self._pieces.append((filled, self._huge_bytes - filled))

    def take_pages(self, spare: Iterable[Mapping]) -> None:
        """Take over huge pages of `spare`, in that order, as many as there is place for.

        They keep their content. Where the kernel moves no pages, none are taken; and where they
        would come in more pieces than it should keep books of, not all.
        """
        filled = self.movable_bytes
        for source in spare:
            while source._pieces and filled < self._huge_bytes:
                if len(self._pieces) == _MOST_PIECES:
                    return
                offset, nbytes = source._pieces[0]
                moved = min(nbytes, self._huge_bytes - filled)
                if not _move(source.address + offset, self.address + filled, moved):
                    return
                source._pieces[:1] = [(offset + moved, nbytes - moved)] if moved < nbytes else []
                self._pieces.append((filled, moved))
                filled += moved

    def close(self) -> None:
        """Unmap it; no view of it may be left (BufferError)."""
        self._memory.close()

    def _address(self, offset: int) -> int:
        return int(np.frombuffer(self._memory, np.uint8, 1, offset).ctypes.data)


def resident(
    nbytes: int, spare: Sequence[Mapping] = (), *, rest_bytes: int = 0
) -> tuple[Mapping, Mapping | None]:
    """Return a resident mapping in the place of `spare`, and one of what remains of these.

    The huge pages of `spare` go to the new mappings: the kernel need not zero them again, a tenth
    of the time of a small step. What remains has at most `rest_bytes`. Nothing is made resident
    before what is left of `spare` is unmapped, so at no time does memory hold more than before or
    than asked for. What the pages held is what the mappings begin with. Raises OSError (ENOMEM)
    when there is no memory; `spare` is gone then, too.
    """
    moved: tuple[Mapping, Mapping | None] | None = None
    with suppress(OSError):  # no addresses for both at a time (ulimit -v): one after the other
        moved = _move_pages(nbytes, spare, rest_bytes)
    for given in spare:
        given.close()
    mapping, rest = moved or (Mapping(nbytes), None)
    try:
        mapping.populate()
    except OSError:
        mapping.close()
        if rest is not None:
            rest.close()
        raise
    return mapping, rest


def _move_pages(
    nbytes: int, spare: Sequence[Mapping], rest_bytes: int
) -> tuple[Mapping, Mapping | None]:
    mapping = Mapping(nbytes)
    mapping.take_pages(spare)
    rest_bytes = min(rest_bytes, sum(given.movable_bytes for given in spare))
    rest_bytes -= rest_bytes % HUGE_PAGE_BYTES
    if rest_bytes <= 0:
        return mapping, None
    with suppress(OSError):
        rest = Mapping(rest_bytes)
        rest.take_pages(spare)
        if rest.movable_bytes == rest_bytes:
            return mapping, rest
        rest.close()
    return mapping, None


def touch(nbytes: int) -> None:
    """Take `nbytes` of RAM and give them back: what would fail in the middle of a run fails now.

    Raises OSError when the kernel refuses.
    """
    mapping, _ = resident(-(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    mapping.close()


def _move(source: int, target: int, nbytes: int) -> bool:
    """Move the pages behind one address to another; the source stays mapped, without pages.

    If it were unmapped, another thread's mapping could lie there when its owner unmaps it. False
    where the kernel does not do it.
    """
    calls = _calls()
    if calls is None:
        return False
    how = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if calls.mremap(source, nbytes, nbytes, how, target) == target:
        return True
    # The target may have been unmapped before it failed: its owner must find it mapped.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    calls.mmap(target, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return False


@cache
def _calls() -> ctypes.CDLL | None:
    """Return the C library, for mremap and mmap, where there is an mremap (Linux)."""
    process = ctypes.CDLL(None)
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
