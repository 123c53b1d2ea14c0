"""glibc's allocator, told to keep large freed blocks for reuse."""

from __future__ import annotations

import ctypes
from functools import cache

__all__ = ["release", "retain", "trim", "tune"]

# Names and numbers are those of <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
_NEVER = -1  # mallopt stores it as size_t: the largest threshold
_LARGE_BYTES = 1 << 20


def tune() -> None:
    """Keep large blocks out of the heap, and give it no second arena; before the first tensor.

    What capturing and initialising a model take in large temporaries goes back to the kernel and
    leaves no holes between the small objects that stay. Does nothing where there is no glibc.
    """
    _set((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, _LARGE_BYTES), (M_MMAP_MAX, 1 << 16))


def retain() -> None:
    """From now on keep freed blocks in the process, large ones too: training begins.

    By default glibc maps each block above a threshold on its own and unmaps it when it is freed,
    so that every temporary of a training step faults its pages in again. Here all blocks come from
    the heap, which is never trimmed.
    """
    _set((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, _NEVER), (M_TOP_PAD, 16 << 20))


def release() -> None:
    """End `retain`, and give the heap's free pages back."""
    _set((M_MMAP_MAX, 1 << 16), (M_TRIM_THRESHOLD, 1 << 20), (M_TOP_PAD, 1 << 17))
    trim()


def _set(*options: tuple[int, int]) -> None:
    libc = _glibc()
    for option, value in options if libc is not None else ():
        assert libc is not None
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
