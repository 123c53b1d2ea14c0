"""The C allocator, told to keep large freed blocks for reuse: glibc's, or a preloaded tcmalloc."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache
from typing import NamedTuple

__all__ = ["AllocatorBytes", "grow_heap", "heap_bytes", "release", "restart_without_cache"]
__all__ += ["retain", "set_apart", "trim", "tune"]

# Names and numbers are those of <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
_NEVER = -1  # mallopt stores it as size_t: the largest threshold
_LARGE_BYTES = 1 << 20
_APART_BYTES = 64 << 10
"""Of a free block for small objects: far smaller than a tensor of a step, far larger than they."""
_SMALL_SIZES = range(24, 136, 16)
"""What is asked for of the blocks of 32 to 128 bytes."""
_OBJECT_BYTES = 2560
"""Of what is larger and belongs to one object."""
_CACHE_COUNT = "glibc.malloc.tcache_count"
_MALLINFO = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"]
_MALLINFO += ["fordblks", "keepcost"]
_TCMALLOC_ALLOCATED, _TCMALLOC_HEAP = b"generic.current_allocated_bytes", b"generic.heap_size"


class AllocatorBytes(NamedTuple):
    """What an allocator has given out, and what it holds."""

    allocated_bytes: int
    """In use by whoever asked for it."""
    reserved_bytes: int
    """In use or free, for reuse; of a C heap also pages that went back to the kernel."""
    most_allocated_bytes: int = 0
    """The most in use at once during the last step, where that is counted."""


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def restart_without_cache() -> None:
    """Execute this process anew with glibc's per-thread cache of small blocks off, if it is on.

    Torch's blocks are aligned: behind each remains a small piece, which the cache keeps, as if it
    were in use, so that the blocks on both sides never become one again. What a language model's
    last segment takes was seen to be 250 MiB without the cache, 410 to 720 with it. glibc takes
    the setting only from the environment of a process that starts. Call it before anything else:
    a restart takes the time that Python needs to start, and keeps the process's number.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or not sys.executable or _CACHE_COUNT in tunables:
        return
    joined = ":".join(filter(None, (tunables, f"{_CACHE_COUNT}=0")))
    with suppress(OSError):  # then it stays as it is, and takes more
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": joined})


def tune() -> None:
    """Keep large blocks out of the heap, and give it no second arena; before the first tensor.

    What capturing and initialising a model take in large temporaries goes back to the kernel and
    leaves no holes between the small objects that stay. Does nothing where there is no glibc, nor
    under tcmalloc, which keeps sizes apart and freed blocks for reuse by itself.
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


def set_apart(objects: int) -> None:
    """Leave free blocks in the heap that only small objects fit into, enough for `objects`.

    torch aligns its tensors, so glibc cuts a piece of 32 to 128 bytes off behind each. A small
    object that lives on, such as an autograd node's, takes the smallest piece it fits into. Then
    the freed tensor's block never grows back to what the same tensor asks for, and the heap grows
    with every forward whose backward comes later (from 88 to 446 MiB for a Llama of 271 M with
    adapters and 8 micro-batches). With pieces of these sizes elsewhere that does not happen.
    Between two of them lies one that is never freed, which keeps them from becoming one.
    """
    libc = _glibc()
    if libc is None or _tcmalloc() is not None:
        return
    sizes = [size for size in _SMALL_SIZES for _ in range(objects)]
    sizes += [_APART_BYTES] * -(-objects * _OBJECT_BYTES // _APART_BYTES)
    pairs = [(libc.malloc(size), libc.malloc(1)) for size in sizes]
    for block, _ in pairs:
        libc.free(block)


def grow_heap(nbytes: int) -> int:
    """Give the heap a free block of `nbytes`; return by how much it grew for that, 0 if it had one.

    No page of the block is touched, so what it grew is not resident before somebody uses it. Call
    it under `retain`; 0 too with an unknown allocator.
    """
    libc = _glibc()
    if libc is None or _tcmalloc() is not None:
        return 0
    before = libc.sbrk(0)
    block = libc.malloc(nbytes)
    grown = libc.sbrk(0) - before
    libc.free(block)
    return int(grown)


def _set(*options: tuple[int, int]) -> None:
    libc = _glibc()
    for option, value in options if libc is not None else ():
        assert libc is not None
        libc.mallopt(option, value)


def trim() -> None:
    """Give free pages of the heap back to the kernel; does nothing with an unknown allocator."""
    tcmalloc, libc = _tcmalloc(), _glibc()
    if tcmalloc is not None:
        tcmalloc.MallocExtension_ReleaseFreeMemory()
    elif libc is not None:
        libc.malloc_trim(0)


def heap_bytes() -> AllocatorBytes | None:
    """Return what the C allocator holds now; None where it does not say.

    Whatever takes memory by malloc is in it: on a CPU all tensors that are not in slabs.
    """
    tcmalloc, info = _tcmalloc(), _mallinfo2()
    if tcmalloc is not None:
        return _tcmalloc_bytes(tcmalloc)
    if info is None:
        return None
    found = info.mallinfo2()
    return AllocatorBytes(found.uordblks + found.hblkhd, found.arena + found.hblkhd)


def _tcmalloc_bytes(tcmalloc: ctypes.CDLL) -> AllocatorBytes | None:
    if not hasattr(tcmalloc, "MallocExtension_GetNumericProperty"):
        return None
    found = []
    for name in (_TCMALLOC_ALLOCATED, _TCMALLOC_HEAP):
        value = ctypes.c_size_t()
        if not tcmalloc.MallocExtension_GetNumericProperty(name, ctypes.byref(value)):
            return None
        found.append(value.value)
    return AllocatorBytes(*found)


@cache
def _mallinfo2() -> ctypes.CDLL | None:
    """Return glibc 2.33 or later, which counts beyond 2 GiB."""
    libc = _process("gnu_get_libc_version", "mallinfo2")
    if libc is not None:
        libc.mallinfo2.restype = _MallInfo2
    return libc


@cache
def _tcmalloc() -> ctypes.CDLL | None:
    """Return this process's symbols if gperftools' tcmalloc was preloaded (LD_PRELOAD)."""
    return _process("MallocExtension_ReleaseFreeMemory")


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc."""
    libc = _process("gnu_get_libc_version", "mallopt", "malloc_trim", "sbrk")
    if libc is not None:
        libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
        libc.malloc_trim.argtypes = (ctypes.c_size_t,)
        libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
        libc.sbrk.argtypes, libc.sbrk.restype = (ctypes.c_ssize_t,), ctypes.c_ssize_t
    return libc


def _process(*names: str) -> ctypes.CDLL | None:
    """Return the symbols of this process if these are among them."""
    try:
        process = ctypes.CDLL(None)
    except OSError:
        return None
    return process if all(hasattr(process, name) for name in names) else None
