"""What this machine can do: the disk's speed, flop/s, and how much I/O slows computing.

The figures are estimates of a moment: each is measured for a few tenths of a second, on an
otherwise idle machine at best, with a file of 128 MiB; a drive that slows down when its write cache
is full is overestimated, one that is busy underestimated. They are used for predictions and for
`roofline_fraction`, never for what a run computes.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from swaptrain.errors import SwaptrainError
from swaptrain.execute.processor import this_machine
from swaptrain.program.cost import Disk, IOWork
from swaptrain.store.buffers import io_buffer
from swaptrain.store.direct import DirectIO
from swaptrain.store.files import existing_parent, free_bytes, user_cache
from swaptrain.strict_json import read_json

__all__ = ["Machine", "cache_path", "known_machine", "machine"]

_PIECE_BYTES = 4 << 20
_PIECES = 32
_DEPTH = 4
_DISK_S = 0.2
_COMPUTE_S = 0.2
_ROUNDS = 3
_SIZE = 512
_FORMAT = 5
_MOST_BYTES = 2**20
_MOST_PER_S = 1e18


@dataclass(frozen=True)
class Machine:
    """One machine with one disk and one compute device."""

    disk: Disk
    sigma: float
    """Seconds that computing gets slower by for each second of I/O at full speed beside it."""
    io_work: IOWork
    """The same by request and byte, for those that are small or have checksums."""
    flops_per_s: dict[str, float]
    """By dtype: of square matrix products, which a model's layers hardly reach."""


def cache_path() -> Path:
    """Return the file where measurements are kept."""
    return user_cache() / "machine.json"


def known_machine(path: Path, device: torch.device) -> Machine | None:
    """Return what was measured before for the disk of `path`, None if nothing was."""
    return _known(path, device)[0]


def _known(path: Path, device: torch.device) -> tuple[Machine | None, bool]:
    """Return what was measured, and whether the machine was busy then, so that it may be wrong."""
    entry = _read_cache().get(_key(path, device))
    try:
        return (None, False) if entry is None else (_from_json(entry), bool(entry.get("busy")))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None, False


def machine(
    path: Path, device: torch.device, dtypes: Sequence[str], note: Callable[[str], None]
) -> Machine | None:
    """Return the machine's figures, measuring them in the directory `path` the first time.

    Measured again when the disk or the processor is another one, when the figures cannot be read,
    and, on a machine that was busy at the time, once it is not: the better ones of both are kept.
    Takes about four seconds, 128 MiB of disk and 20 MiB of memory. None where the disk refuses: a
    run does not fail because its speed is unknown.
    """
    known, busy = _known(path, device)
    busy_now = _is_busy()
    if (
        known is not None
        and (busy_now or not busy)
        and all(dtype in known.flops_per_s for dtype in dtypes)
    ):
        return known
    if free_bytes(path) < 2 * _PIECES * _PIECE_BYTES:
        return None
    note(
        "measuring the disk and the processor, four seconds"
        + (": other processes are at work, so it will be done again" if busy_now else "")
    )
    try:
        found = _better(known, _measure(path, device, dtypes, None if busy else known))
    except (SwaptrainError, OSError) as error:
        note(f"the speed of the disk cannot be measured: {error}")
        return None
    _write_cache(_key(path, device), {**asdict(found), "busy": busy_now})
    return found


def _better(first: Machine | None, second: Machine) -> Machine:
    """Return the higher speeds of two measurements: work beside them only makes them lower."""
    if first is None:
        return second
    before = vars(first.disk)
    speeds = {name: max(speed, before[name]) for name, speed in vars(second.disk).items()}
    flops = {**first.flops_per_s, **second.flops_per_s}
    flops = {dtype: max(speed, first.flops_per_s.get(dtype, 0.0)) for dtype, speed in flops.items()}
    work = vars(first.io_work)
    least = {name: min(cost, work[name]) for name, cost in vars(second.io_work).items()}
    return Machine(Disk(**speeds), min(first.sigma, second.sigma), IOWork(**least), flops)


def _is_busy() -> bool:
    """Whether more processes want to run than there are cores, over the last minute."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


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
        count = iter(range(_PIECES))
        self.run(lambda _: True, lambda: next(count, None) is None)

    def run(self, writes: Callable[[int], bool], stop: Callable[[], bool]) -> float:
        """Return bytes per second; `writes` says of each request whether it is a write."""
        begun, number = time.perf_counter(), 0
        pending: deque[tuple[memoryview, Future[Any]]] = deque()
        free = deque(self._memory)
        while not stop():
            if not free:
                memory, future = pending.popleft()
                future.result()
                free.append(memory)
            memory = free.popleft()
            offset = number % _PIECES * _PIECE_BYTES
            request: Future[Any] = (
                self._io.write(self._path, memory, offset=offset, flush=False, checksum=False)
                if writes(number)
                else self._io.read(self._path, memory, offset=offset)
            )
            pending.append((memory, request))
            number += 1
        self.requests += number
        for _, future in pending:
            future.result()
        self._io.flush(self._path).result()
        return number * _PIECE_BYTES / (time.perf_counter() - begun)

    def checksum_s(self) -> float:
        """Return the seconds that the checksum of a byte takes."""
        taken = []
        for memory in self._memory:
            begun = time.perf_counter()
            xxhash.xxh3_64_intdigest(memory)
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken) / _PIECE_BYTES


def _measure(
    path: Path, device: torch.device, dtypes: Sequence[str], known: Machine | None
) -> Machine:
    file = path / "speed.tmp"
    try:
        with DirectIO(_DEPTH) as io:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, _PIECES * _PIECE_BYTES)
            finally:
                os.close(descriptor)
            load = _Load(io, file)
            load.fill()
            # Turn and turn about: what slows the disk for a moment must not look like its speed.
            kinds = (lambda _: False), (lambda _: True), _every_other
            rounds = [[load.run(kind, _timer(_DISK_S)) for kind in kinds] for _ in range(_ROUNDS)]
            disk = Disk(*map(max, zip(*rounds, strict=True)))
            flops = dict(known.flops_per_s) if known is not None else {}
            flops.update({dtype: _flops_per_s(device, dtype) for dtype in dtypes})
            return Machine(disk, _sigma(load, device), _io_work(load, device), flops)
    finally:
        file.unlink(missing_ok=True)


def _every_other(number: int) -> bool:
    return bool(number % 2)


def _timer(duration_s: float) -> Callable[[], bool]:
    end = time.perf_counter() + duration_s
    return lambda: time.perf_counter() >= end


def _sigma(load: _Load, device: torch.device) -> float:
    """Return how much slower matrix products are while the disk is fully busy, as a part of 1.

    The median of several trials, each a moment alone and one beside the disk.
    """
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


def _io_work(load: _Load, device: torch.device) -> IOWork:
    """Return the processor's seconds of requests and checksums, as far as computing loses them.

    All of them where PyTorch's threads have every core: each waits for the one that was held up.
    None where a GPU computes. Steadier than what matrix products lose (`_sigma`), which is a small
    difference of two speeds.
    """
    if device.type == "cuda":
        return IOWork(0.0, 0.0)
    made, busy_s = load.requests, time.process_time()
    load.run(_every_other, _timer(_DISK_S))
    request_s = (time.process_time() - busy_s) / (load.requests - made)
    lost = min(1.0, torch.get_num_threads() / len(os.sched_getaffinity(0)))
    return IOWork(lost * request_s, lost * load.checksum_s())


def _flops_per_s(device: torch.device, dtype: str) -> float:
    kind = getattr(torch, dtype)
    left = torch.ones(_SIZE, _SIZE, dtype=kind, device=device)
    result = torch.empty_like(left)
    torch.mm(left, left, out=result)
    _settle(device)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < _COMPUTE_S:
        for _ in range(4):
            torch.mm(left, left, out=result)
        count += 4
        _settle(device)
    return 2.0 * _SIZE**3 * count / (time.perf_counter() - begun)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(path: Path, device: torch.device) -> str:
    """Name the machine, the disk and the processor: other ones have figures of their own."""
    there = existing_parent(path)
    number, system = there.stat().st_dev, os.statvfs(there)
    disk = f"{os.major(number)}:{os.minor(number)} of {system.f_blocks * system.f_frsize} bytes"
    here = this_machine(device)
    processor = here["device"] if device.type == "cuda" else here["processor"]
    threads = torch.get_num_threads()
    return f"{_FORMAT} {socket.gethostname()} disk {disk} {processor} {threads} threads"


def _from_json(entry: dict[str, Any]) -> Machine:
    """Return figures that can be reckoned with; raises ValueError or TypeError for others."""
    work = IOWork(**entry["io_work"])
    found = Machine(Disk(**entry["disk"]), entry["sigma"], work, dict(entry["flops_per_s"]))
    speeds = [*vars(found.disk).values(), *found.flops_per_s.values()]
    if not all(type(speed) is float and 0 < speed < _MOST_PER_S for speed in speeds):
        raise ValueError("a speed is not a number greater than 0")
    if type(found.sigma) not in {int, float} or not 0 <= found.sigma <= 1:
        raise ValueError("sigma does not lie between 0 and 1")
    if not all(type(cost) is float and 0 <= cost < 1 for cost in vars(work).values()):
        raise ValueError("what I/O costs does not lie between 0 and 1 second")
    return found


def _read_cache() -> dict[str, Any]:
    try:
        tree = read_json(cache_path(), _MOST_BYTES)
    except (OSError, ValueError):
        return {}  # never measured, or not readable: it is measured again
    return tree if isinstance(tree, dict) else {}


def _write_cache(key: str, entry: dict[str, Any]) -> None:
    with suppress(OSError):  # a home that cannot be written: the next run measures again
        path = cache_path()
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({**_read_cache(), key: entry}, indent=1))
        aside.replace(path)
