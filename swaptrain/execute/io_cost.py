"""Measures how much longer instructions take beside the I/O of their step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from swaptrain.config import Config
from swaptrain.errors import RunError
from swaptrain.execute.cutting import short_steps
from swaptrain.execute.dry_run import DryRun, samples
from swaptrain.execute.layouts import Layouts
from swaptrain.execute.machine import Machine
from swaptrain.execute.planning import Plan
from swaptrain.execute.price import instruction_seconds, price
from swaptrain.memory.malloc import release, retain
from swaptrain.program.residency import Traffic
from swaptrain.store.buffers import io_buffer
from swaptrain.store.direct import PAGE_BYTES, DirectIO
from swaptrain.store.files import allocate, free_bytes

__all__ = ["with_io_cost"]

_LONGEST_S = 0.3
"""Of one instruction of each kind and class: to measure longer ones would take seconds, and what
I/O costs them is forecast well enough by what it costs the processor (`IOWork`)."""
_SHORTEST_S = 0.1
"""Of a step: what a shorter one takes changes from moment to moment."""
_ROUNDS = 5
_UNDER_WAY = 8
_MOST_BYTES, _MOST_PIECES = 64 << 20, 64
"""Of the file, and of memory: more than a processor's cache, as a step's I/O goes through."""


class _Load:
    """Reads and writes pieces of a file, from memory of its own, as many a second as a step."""

    def __init__(self, io: DirectIO, file: Path, piece_bytes: int, pieces: int) -> None:
        self._io, self._file, self._piece_bytes = io, file, piece_bytes
        self._memory = [io_buffer(piece_bytes) for _ in range(pieces)]
        self._made = 0

    def __enter__(self) -> _Load:
        """Make the file, and write it: blocks that were never written are not read from a disk."""
        pieces, size = len(self._memory), self._piece_bytes
        try:
            allocate(self._file, pieces * size)
            writes = [
                self._io.write(self._file, memory, offset=number * size, flush=False)
                for number, memory in enumerate(self._memory)
            ]
            for written in writes:
                written.result()
            self._io.flush(self._file).result()
        except BaseException:
            self._file.unlink(missing_ok=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)

    @contextmanager
    def beside(self, traffic: Traffic, seconds: float) -> Iterator[None]:
        """Make a step's traffic of so many seconds, over and over, beside a `with` block."""
        done = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="swaptrain-load") as executor:
            busy = executor.submit(self._run, traffic, seconds, done)
            try:
                yield
            finally:
                done.set()
            busy.result()

    def _run(self, traffic: Traffic, seconds: float, done: threading.Event) -> None:
        begun, moved, written = time.perf_counter(), 0, 0
        under_way: set[Future[Any]] = set()
        while not done.is_set():
            due_s = moved / traffic.total_bytes * seconds - (time.perf_counter() - begun)
            if done.wait(max(0.0, due_s)):
                break
            write = written * traffic.total_bytes < (moved + 1) * traffic.write_bytes
            under_way.add(self._request(self._made, write=write))
            self._made += 1
            moved, written = moved + self._piece_bytes, written + write * self._piece_bytes
            if len(under_way) == _UNDER_WAY:
                ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for request in ended:
                    request.result()
        for request in under_way:
            request.result()

    def _request(self, number: int, *, write: bool) -> Future[Any]:
        number %= len(self._memory)
        memory, offset = self._memory[number], number * self._piece_bytes
        if write:
            return self._io.write(self._file, memory, offset=offset, flush=True)
        return self._io.read(self._file, memory, offset=offset)


def with_io_cost(
    plan: Plan,
    config: Config,
    machine: Machine,
    batch: Mapping[str, Tensor],
    io: DirectIO,
    folder: Path,
) -> Plan:
    """Return the plan with how many times as long its instructions take beside a step's I/O.

    One of each kind and class is executed alone and beside reads and writes of a file in `folder`,
    as large as a chunk and as many a second as in the step that is forecast, turn and turn about.
    Left out where it is less than what is reckoned (`IOWork`, the processor's own seconds), where
    instructions are long or steps short, where a GPU computes, where memory or disk have no room,
    and where the disk refuses, which the run then says in its own words.
    """
    file = folder / "speed.tmp"
    with suppress(OSError):  # of a start that was killed
        file.unlink(missing_ok=True)
    builder, device = short_steps(plan.builder), plan.operations.device
    pending = plan.layouts.updated if builder.deferred else ()
    groups = samples(plan.captured, builder.step(pending_updates=pending))
    seconds = instruction_seconds(plan)
    if device.device.type != "cpu" or sum(seconds(i) for g in groups for i in g) > _LONGEST_S:
        return plan
    room_bytes = min(plan.pool_bytes - plan.peaks.instruction_bytes, _MOST_BYTES)
    piece_bytes = _pages(min(_chunk_bytes(plan.layouts), room_bytes // _UNDER_WAY))
    pieces = min(room_bytes // piece_bytes, _MOST_PIECES)
    forecast = price(plan, config, machine)
    traffic, step_s = forecast.traffic, forecast.step_s
    if traffic is None or not traffic.total_bytes or step_s is None or step_s < _SHORTEST_S:
        return plan
    if pieces < _UNDER_WAY or free_bytes(folder) < 2 * pieces * piece_bytes:
        return plan
    alone, beside = (_dry_run(plan, batch) for _ in range(2))
    retain()
    try:
        with _Load(io, file, piece_bytes, pieces) as load:
            for step in range(2, 2 + _ROUNDS):  # in step 1 an optimizer makes its state
                for group in groups:
                    alone.sample(group, step)
                with load.beside(traffic, step_s):
                    for group in groups:
                        beside.sample(group, step)
    except (OSError, RunError):
        return plan
    finally:
        device.begin(-1)  # the copies that it keeps are of slabs that are gone
        release()
    found = replace(plan, beside_io=_step_s(plan, beside) / _step_s(plan, alone))
    found_s = price(found, config, machine).step_s
    return found if found_s is not None and found_s > step_s else plan


def _dry_run(plan: Plan, batch: Mapping[str, Tensor]) -> DryRun:
    clipped = plan.builder.deferred
    return DryRun(plan.captured, plan.layouts, plan.operations, batch, clipped=clipped)


def _step_s(plan: Plan, found: DryRun) -> float:
    """Return the seconds of a step whose instructions take what a dry run has found."""
    return sum(map(instruction_seconds(replace(plan, measured=found.measured)), plan.step))


def _chunk_bytes(layouts: Layouts) -> int:
    """Return the mean size of a chunk of the state."""
    arrays = [array for segment in layouts.state.values() for array in segment.arrays]
    return sum(array.nbytes for array in arrays) // max(1, sum(array.chunks for array in arrays))


def _pages(nbytes: int) -> int:
    """Return what there is of whole pages in so many bytes, one at the least."""
    return max(1, nbytes // PAGE_BYTES) * PAGE_BYTES
