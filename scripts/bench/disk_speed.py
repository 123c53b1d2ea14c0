"""What a disk can do at a mix of reads and writes, measured with swaptrain's own direct I/O.

python scripts/bench/disk_speed.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.units import GIB, MIB

__all__ = ["disk_bytes_per_s"]

REQUEST_BYTES = 16 * MIB
PROBE_BYTES = 1 * GIB


def disk_bytes_per_s(directory: Path, read_bytes: float, write_bytes: float) -> float:
    """Measure the disk with the project's own engine, at the mix of reads and writes that is given.

    Writes are flushed. Files of 1 GiB in all are made for it; requests of 16 MiB, eight at a time.
    The better of two passes counts: a floor is what the disk can do, not what it does when others
    use it.
    """
    files = [directory / f"probe{i}" for i in range(PROBE_BYTES // REQUEST_BYTES)]
    buffers = [io_buffer(REQUEST_BYTES) for _ in range(8)]
    for buffer in buffers:
        buffer[:] = os.urandom(REQUEST_BYTES)
    written_share = write_bytes / max(1.0, read_bytes + write_bytes)
    with DirectIO() as io:
        for path in files:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, REQUEST_BYTES)
            io.write(path, buffers[0], flush=True).result()
        fastest_s = min(pass_s(io, files, buffers, written_share) for _ in range(2))
    for path in files:
        path.unlink()
    return 2 * len(files) * REQUEST_BYTES / fastest_s


def pass_s(
    io: DirectIO, files: Sequence[Path], buffers: Sequence[memoryview], written_share: float
) -> float:
    """Move the files' bytes twice, `written_share` of them to the disk; return the seconds."""
    pending: deque[Future[Any]] = deque()
    owed, start_s = 0.0, time.perf_counter()
    for i in range(2 * len(files)):
        # A buffer is free again when the request that had it is the oldest, and done.
        if len(pending) == len(buffers):
            pending.popleft().result()
        path, buffer = files[i % len(files)], buffers[i % len(buffers)]
        owed += written_share
        if owed >= 0.5:
            pending.append(io.write(path, buffer, flush=True, checksum=False))
            owed -= 1
        else:
            pending.append(io.read(path, buffer))
    for future in pending:
        future.result()
    return time.perf_counter() - start_s


def main() -> int:
    """Print the speed of the directory's disk: reads alone, writes alone, half and half."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path())
    directory = parser.parse_args().directory
    if not directory.is_dir():
        parser.error(f"{directory} is no directory")
    for name, read, write in (("read", 1, 0), ("write", 0, 1), ("read + write", 1, 1)):
        print(f"{name}: {disk_bytes_per_s(directory, read, write) / 1e9:.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
