"""glibc's allocator, told to keep large freed blocks for reuse."""

from __future__ import annotations

import ctypes
from functools import cache

__all__ = ["trim", "tune"]

# Names and numbers are those of <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
_NEVER = -1  # mallopt stores it as size_t: the largest threshold


def tune() -> None:
    """Keep freed blocks in the process; call it before the first tensor exists.

    By default glibc maps each block above a threshold on its own and unmaps it when it is freed,
    so that every temporary of a training step faults its pages in again. Here all blocks come from
    one heap that is never trimmed: one arena, because the heaps of further arenas are 64 MiB each
    and holes in one are of no use to another. Does nothing where the C library is not glibc.
    """
    libc = _glibc()
    if libc is None:
        return
    # Any of these also switches off the dynamic threshold, which would undo M_MMAP_MAX's effect.
    for option, value in (
        (M_MMAP_MAX, 0),
        (M_TRIM_THRESHOLD, _NEVER),
        (M_TOP_PAD, 16 * 2**20),
        (M_ARENA_MAX, 1),
    ):
        libc.mallopt(option, value)


def trim() -> None:
    """Give free pages of the heap back to the kernel; does nothing where there is no glibc."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
    except OSError:
        return None
    if not all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")):
        return None
    libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    return libc
