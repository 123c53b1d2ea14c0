"""What torch reads when it is imported, and how its threads wait."""

from __future__ import annotations

import os
from contextlib import suppress

from swaptrain.memory.malloc import tune
from swaptrain.store.disk.durable_files import user_cache

__all__ = ["SPIN_COUNT", "set_up_torch"]

SPIN_COUNT = 10_000
"""Rounds of GNU's OpenMP before a thread that waits sleeps: 0.1 to 0.2 ms."""


def set_up_torch() -> None:
    """Set up what torch reads when it is imported: the allocator, and how its threads wait.

    Threads that spin for long while they wait for each other take the cores from the I/O threads,
    and make a step ten times slower where another process wants them too. Threads that sleep at
    once take 70 microseconds to wake, before each operation, ten times what a small one takes.
    So they spin for a tenth of a millisecond. Waiting changes no result.
    """
    # torch makes this directory when it is imported, else under a name in /tmp that anybody knows.
    with suppress(OSError):
        torch_cache = user_cache() / "torch"
        torch_cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(torch_cache))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    tune()
