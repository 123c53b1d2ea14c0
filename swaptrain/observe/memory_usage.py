"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

__all__ = ["peak_resident_bytes", "reset_peak", "resident_bytes"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RESET_PEAK = "5"  # man 5 proc_pid_clear_refs: sets VmHWM to the present VmRSS


def resident_bytes() -> int:
    """Return the bytes that are resident now, looked up in some microseconds (VmRSS)."""
    return int(os.pread(_statm(os.getpid()), 256, 0).split()[1]) * _PAGE_BYTES


def peak_resident_bytes() -> int:
    """Return the most bytes that were resident since the start or the last `reset_peak` (VmHWM)."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Let the peak start from what is resident now; tell whether the kernel allowed it."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


@cache
def _statm(_pid: int) -> int:
    """Return a descriptor of this process's counts, kept open, since to open it takes longest.

    By process: one that was forked must not go on with its parent's.
    """
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # man 5 proc_pid_statm


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # the kernel writes "1234 kB" for KiB
    raise OSError(f"/proc/self/status has no {field}")
