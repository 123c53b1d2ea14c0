"""Memory for direct I/O."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

__all__ = ["io_buffer"]

_HUGE_PAGE_BYTES = 2 * 2**20


def io_buffer(nbytes: int) -> memoryview:
    """Return `nbytes` of zeros, in whole huge pages as far as they go; unmapped with the last view.

    A request to a disk has room for so many pieces of memory (254 on the development machine), and
    a page of 4 KiB is one: from single pages that disk was seen to be half as fast.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < _HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, nbytes, flags=flags))
    # The extra address range is never touched, so it costs no memory.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=flags)
    start = -np.frombuffer(memory, np.uint8, 1).ctypes.data % _HUGE_PAGE_BYTES
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return memoryview(memory)[start : start + nbytes]
