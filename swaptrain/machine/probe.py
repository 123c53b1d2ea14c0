"""Measures what a machine can do: the disk's speed, flop/s, and what I/O takes from computing.

The figures are estimates of a moment: each is measured for a few tenths of a second, on an
otherwise idle machine at best, with a file of 128 MiB; a drive that slows down when its write cache
is full is overestimated, one that is busy underestimated. They are used for predictions and for
`roofline_fraction`, never for what a run computes.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from swaptrain.program.cost import Disk, IOWork
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.store.format.record import encode_record, record_size
from swaptrain.store.paths import SPEED_PROBE, SPEED_RECORD

__all__ = ["FILE_BYTES", "Machine", "measure"]

_PIECE_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10
_PIECES = 32
FILE_BYTES = _PIECES * _PIECE_BYTES
_DEPTH = 4
_DISK_S, _DISK_ROUNDS = 0.4, 2
_BURST_S = 0.15
"""What a disk does before is not counted: one whose speed is limited may begin faster."""
_REQUESTS = 64
_COMMITS = 4
_COMPUTE_S = 0.2
_ROUNDS = 3
_SIZE, _ACCELERATOR_SIZE = 512, 4096
"""Of square products: on a device that is asked from afar one has to take milliseconds."""


@dataclass(frozen=True)
class Machine:
    """One machine with one disk and one compute device."""

    disk: Disk
    sigma: float
    """Seconds that computing gets slower by for each second of I/O at full speed beside it: for the
    floor of a step. A forecast reckons with `io_work`."""
    io_work: IOWork
    """The seconds of a processor that I/O takes from computing."""
    flops_per_s: dict[str, float]
    """By dtype: of square matrix products, which a model's layers hardly reach."""


class _Load:
    """Reads and writes pieces of one file, several at a time, until told to stop."""

    def __init__(self, io: DirectIO, path: Path) -> None:
        self._io, self._path = io, path
        noise = os.urandom(1 << 16)  # some drives compress
        self._memory = [io_buffer(_PIECE_BYTES) for _ in range(_DEPTH)]
        for memory in self._memory:
            memory[:] = noise * (_PIECE_BYTES // len(noise))
        self.requests = 0
        """Made so far."""

    def fill(self) -> None:
        """Write the whole file once: blocks that never were written are slower, or not read."""
        self.run(lambda _: True, _times(_PIECES))

    def run(
        self,
        writes: Callable[[int], bool],
        stop: Callable[[], bool],
        *,
        nbytes: int = _PIECE_BYTES,
    ) -> float:
        """Return bytes per second; `writes` says of each request whether it is a write.

        At least one of `nbytes` is made.
        """
        begun, number = time.perf_counter(), 0
        pending: deque[tuple[memoryview, Future[Any]]] = deque()
        free = deque(self._memory)
        while not number or not stop():
            if not free:
                memory, future = pending.popleft()
                future.result()
                free.append(memory)
            memory = free.popleft()
            offset = number % _PIECES * _PIECE_BYTES
            request: Future[Any] = (
                self._io.write(
                    self._path, memory[:nbytes], offset=offset, flush=False, checksum=False
                )
                if writes(number)
                else self._io.read(self._path, memory[:nbytes], offset=offset)
            )
            pending.append((memory, request))
            number += 1
        self.requests += number
        for _, future in pending:
            future.result()
        self._io.flush(self._path).result()
        return number * nbytes / (time.perf_counter() - begun)

    def work_s(self, nbytes: int) -> float:
        """Return the seconds of a processor that a request of `nbytes` takes."""
        made, busy_s = self.requests, time.process_time()
        self.run(_every_other, _times(_REQUESTS), nbytes=nbytes)
        return (time.process_time() - busy_s) / (self.requests - made)

    def checksum_s(self) -> float:
        """Return the seconds of a processor that the checksum of a byte takes."""
        busy_s = time.process_time()
        for memory in self._memory:
            xxhash.xxh3_64_intdigest(memory)
        return (time.process_time() - busy_s) / (len(self._memory) * _PIECE_BYTES)


def measure(
    path: Path, device: torch.device, dtypes: Sequence[str], flops_per_s: Mapping[str, float]
) -> Machine:
    """Measure in the directory `path`, with 128 MiB of it; `flops_per_s` is what is known already.

    Nothing is left there. Raises RunError or OSError where the disk refuses.
    """
    file = path / SPEED_PROBE
    try:
        with DirectIO(2 * _DEPTH) as io:  # of which half may write at once
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, FILE_BYTES)
            finally:
                os.close(descriptor)
            load = _Load(io, file)
            load.fill()
            # Turn and turn about: what slows the disk for a moment must not look like its speed.
            kinds = (lambda _: False), (lambda _: True), _every_other
            rounds = [[_speed(load, kind) for kind in kinds] for _ in range(_DISK_ROUNDS)]
            disk = Disk(*map(max, zip(*rounds, strict=True)))
            work = _io_work(load, path, device)
            flops = dict(flops_per_s)
            flops.update({dtype: _flops_per_s(device, dtype) for dtype in dtypes})
            return Machine(disk, _sigma(load, device), work, flops)
    finally:
        file.unlink(missing_ok=True)


def _speed(load: _Load, writes: Callable[[int], bool]) -> float:
    """Return the bytes per second of a disk that has been at work for a moment."""
    load.run(writes, _timer(_BURST_S))
    return load.run(writes, _timer(_DISK_S))


def _every_other(number: int) -> bool:
    return bool(number % 2)


def _times(count: int) -> Callable[[], bool]:
    """Return what says, from the second request on, whether so many were made."""
    left = iter(range(count - 1))
    return lambda: next(left, None) is None


def _timer(duration_s: float) -> Callable[[], bool]:
    end = time.perf_counter() + duration_s
    return lambda: time.perf_counter() >= end


def _sigma(load: _Load, device: torch.device) -> float:
    """Return how much slower matrix products are while the disk is fully busy, as a part of 1.

    The median of several trials, each a moment alone and one beside the disk. 0 where a GPU
    computes: what would be measured is the thread that asks it.
    """
    if device.type == "cuda":
        return 0.0
    slower = []
    for _ in range(_ROUNDS):
        alone = _flops_per_s(device, "float32")
        done = threading.Event()
        with ThreadPoolExecutor(1) as executor:
            busy = executor.submit(load.run, _every_other, done.is_set)
            try:
                beside = _flops_per_s(device, "float32")
            finally:
                done.set()
            busy.result()
        slower.append(1 - beside / alone)
    return min(1.0, max(0.0, statistics.median(slower)))


def _io_work(load: _Load, path: Path, device: torch.device) -> IOWork:
    """Return the processor's seconds of I/O, as far as computing loses them.

    All of them where PyTorch's threads have every core: each waits for the one that was held up.
    In proportion to their part of the cores where they have fewer; none where a GPU computes.
    Steadier than what matrix products lose (`_sigma`), which is a small difference of two speeds.
    """
    if device.type == "cuda":
        return IOWork()
    lost = min(1.0, torch.get_num_threads() / len(os.sched_getaffinity(0)))
    small = min(load.work_s(_SMALL_BYTES) for _ in range(_ROUNDS))
    large = min(load.work_s(_PIECE_BYTES) for _ in range(_ROUNDS))
    byte_s = max(0.0, (large - small) / (_PIECE_BYTES - _SMALL_BYTES))
    return IOWork(
        request_s=lost * max(0.0, small - byte_s * _SMALL_BYTES),
        byte_s=lost * byte_s,
        checksum_byte_s=lost * load.checksum_s(),
        commit_s=lost * _commit_s(path),
    )


def _commit_s(path: Path) -> float:
    """Return the seconds of a processor that a commit's record and its switch take.

    The record is written, and a rename made durable: of a file, since a start after a kill refuses
    a link in its directory that is not the store's.
    """
    record, attributes = path / SPEED_RECORD, {"commit": list(range(100))}
    size_bytes = record_size(attributes)
    try:
        busy_s = time.process_time()
        for _ in range(_COMMITS):
            write_aside(record, encode_record(attributes, size_bytes))
        return (time.process_time() - busy_s) / _COMMITS
    finally:
        record.unlink(missing_ok=True)


def _flops_per_s(device: torch.device, dtype: str) -> float:
    kind = getattr(torch, dtype)
    size = _ACCELERATOR_SIZE if device.type == "cuda" else _SIZE
    left = torch.ones(size, size, dtype=kind, device=device)
    result = torch.empty_like(left)
    torch.mm(left, left, out=result)
    _synchronize(device)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < _COMPUTE_S:
        for _ in range(4):
            torch.mm(left, left, out=result)
        count += 4
        _synchronize(device)
    return 2.0 * size**3 * count / (time.perf_counter() - begun)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
