"""Measure what computing loses while bytes move beside it, and what a checksum takes.

    python scripts/io_cost.py [DIRECTORY] [--rounds 7]

Computes in turn alone and beside a disk that is kept busy with pieces of 4 MiB: matrix products, a
layer's forward and backward in bfloat16, additions that go through memory. Prints medians of the
part that is lost, of the disk's speed meanwhile, and picoseconds lost per byte that moved. The
checksum (xxh3-64) is timed on memory that is in a core's cache, and on memory that is not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.console import Console
from rich.table import Table

from swaptrain.store.buffers import io_buffer
from swaptrain.store.direct import DirectIO
from swaptrain.units import GIB, MIB

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
PIECE_BYTES, PIECES, DEPTH = 4 * MIB, 64, 8
WINDOW_S, PAUSE_S = 0.15, 0.03
LOADS = {
    # name: whether the nth request writes, and whether with a checksum
    "reads": (lambda _: False, False),
    "writes": (lambda _: True, False),
    "writes with checksums": (lambda _: True, True),
    "both": (lambda number: bool(number % 2), False),
    "both with checksums": (lambda number: bool(number % 2), True),
}


class Load:
    """Keeps the disk busy with one file from a thread of its own, while it runs."""

    def __init__(self, io: DirectIO, path: Path) -> None:
        self._io, self._path = io, path
        self._memory = [io_buffer(PIECE_BYTES) for _ in range(DEPTH)]
        noise = os.urandom(1 << 16)  # some drives compress
        for memory in self._memory:
            memory[:] = noise * (PIECE_BYTES // len(noise))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, PIECES * PIECE_BYTES)
        os.close(descriptor)
        for number in range(PIECES):
            self._request(self._memory[0], number, writes=True, checksum=False).result()

    def beside(self, load: str, action: Callable[[], float]) -> tuple[float, float]:
        """Return what `action` returns with the load beside it, and the load's bytes/s."""
        done = threading.Event()
        moved: list[float] = []
        thread = threading.Thread(target=lambda: moved.append(self._run(load, done)))
        thread.start()
        try:
            result = action()
        finally:
            done.set()
            thread.join()
        return result, moved[0]

    def _run(self, load: str, done: threading.Event) -> float:
        writes, checksum = LOADS[load]
        free, pending = deque(self._memory), deque[tuple[memoryview, Future[Any]]]()
        begun, number = time.perf_counter(), 0
        while not done.is_set():
            if not free:
                memory, future = pending.popleft()
                future.result()
                free.append(memory)
            memory = free.popleft()
            request = self._request(memory, number, writes=writes(number), checksum=checksum)
            pending.append((memory, request))
            number += 1
        for _, future in pending:
            future.result()
        return number * PIECE_BYTES / (time.perf_counter() - begun)

    def _request(
        self, memory: memoryview, number: int, *, writes: bool, checksum: bool
    ) -> Future[Any]:
        offset = number % PIECES * PIECE_BYTES
        if writes:
            return self._io.write(self._path, memory, offset=offset, flush=False, checksum=checksum)
        return self._io.read(self._path, memory, offset=offset)


def kernels() -> dict[str, Callable[[], None]]:
    """Return what is computed, each a few milliseconds long."""
    square = torch.ones(512, 512, dtype=torch.bfloat16)
    product = torch.empty_like(square)
    inputs = torch.randn(512, 1024, dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(2816, 1024, dtype=torch.bfloat16, requires_grad=True)
    down = torch.randn(1024, 2816, dtype=torch.bfloat16, requires_grad=True)
    large, other = torch.ones(16 * MIB), torch.ones(16 * MIB)

    def products() -> None:
        for _ in range(40):
            torch.mm(square, square, out=product)

    def layer() -> None:
        hidden = torch.nn.functional.silu(inputs @ up.t())
        (hidden @ down.t()).sum().backward()
        inputs.grad = up.grad = down.grad = None

    def additions() -> None:
        large.add_(other)

    return {"matrix products": products, "a layer": layer, "additions": additions}


def per_second(kernel: Callable[[], None]) -> float:
    """Return how often a kernel runs in a second."""
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < WINDOW_S:
        kernel()
        count += 1
    return count / (time.perf_counter() - begun)


def lost(load: Load, name: str, kernel: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Return the part of computing that is lost beside a load, and its bytes/s: medians."""
    parts, speeds = [], []
    kernel()
    for _ in range(rounds):
        before = per_second(kernel)
        beside, speed = load.beside(name, lambda: per_second(kernel))
        time.sleep(PAUSE_S)
        parts.append(1 - 2 * beside / (before + per_second(kernel)))
        speeds.append(speed)
    return statistics.median(parts), statistics.median(speeds)


def checksum_ps(nbytes: int, memory: memoryview, rounds: int) -> float:
    """Return the picoseconds of a byte's checksum, of 1 GiB made in blocks of `memory` in a row."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for start in range(0, GIB, nbytes):
            place = start % len(memory)
            xxhash.xxh3_64_intdigest(memory[place : place + nbytes])
        taken.append((time.perf_counter() - begun) / GIB * 1e12)
    return statistics.median(taken)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "runs")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    options.directory.mkdir(parents=True, exist_ok=True)
    table = Table("beside", "computing", "lost", "GB/s", "ps a byte")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder, DirectIO(DEPTH) as io:
        load = Load(io, Path(folder) / "load")
        for name in LOADS:
            for what, kernel in kernels().items():
                part, speed = lost(load, name, kernel, options.rounds)
                row = f"{part:.0%}", f"{speed / 1e9:.2f}", f"{part / speed * 1e12:.0f}"
                table.add_row(name, what, *row)
    Console(width=100).print(table)
    memory = io_buffer(256 * MIB)
    for start in range(0, len(memory), MIB):
        memory[start : start + MIB] = os.urandom(1 << 10) * 1024
    sums = Table("checksum of", "ps a byte")
    cached, large = memory[: MIB // 2], 32 * MIB
    sums.add_row("512 KiB, in the cache", f"{checksum_ps(len(cached), cached, options.rounds):.0f}")
    sums.add_row("32 MiB, not in it", f"{checksum_ps(large, memory, options.rounds):.0f}")
    Console(width=100).print(sums)


if __name__ == "__main__":
    main()
