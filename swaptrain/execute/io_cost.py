"""Measures how much longer instructions take beside the I/O of their step."""

from __future__ import annotations

import os
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
from swaptrain.errors import SwaptrainError
from swaptrain.execute.cutting import short_steps
from swaptrain.execute.dry_run import DryRun, sample_groups, slab_bytes
from swaptrain.execute.layouts import Layouts
from swaptrain.execute.machine import Machine
from swaptrain.execute.planning import Plan
from swaptrain.execute.price import instruction_seconds, price
from swaptrain.memory.malloc import release, retain
from swaptrain.program.residency import Traffic
from swaptrain.store.buffers import io_buffer
from swaptrain.store.direct import PAGE_BYTES, DirectIO
from swaptrain.store.files import allocate, free_bytes
from swaptrain.store.slot_disks import run_token

__all__ = ["with_io_cost"]

_LONGEST_S = 0.3
"""Of one instruction of each kind and class, together: to measure longer ones would take seconds,
and what I/O costs them is forecast well enough by what it costs the processor (`IOWork`)."""
_SHORTEST_S = 0.3
"""Of a step: what a shorter one takes changes from moment to moment."""
_MOST_INSTRUCTIONS = 1_000
"""Of a step: up to here a rehearsal takes a second."""
_ROUNDS = 5
_LEAST_PIECES, _UNDER_WAY = 4, 8
_MOST_BYTES = 96 << 20
"""Of the file, and of memory: more than a processor's cache, as a step's I/O goes through."""
_NOISE_BYTES = 1 << 16


class _StepIO:
    """Reads and writes pieces of a file as a step does its chunks, from memory of its own."""

    def __init__(self, io: DirectIO, file: Path, piece_bytes: int, pieces: int) -> None:
        self._io, self._file, self._piece_bytes, self._pieces = io, file, piece_bytes, pieces
        self._memory = io_buffer(pieces * piece_bytes)
        self._made = 0

    def __enter__(self) -> _StepIO:
        """Make the file, and write it: blocks that were never written are not read from a disk."""
        noise = os.urandom(_NOISE_BYTES)  # some drives compress
        for begin in range(0, len(self._memory), _NOISE_BYTES):
            part = self._memory[begin : begin + _NOISE_BYTES]
            part[:] = noise[: len(part)]
        try:
            allocate(self._file, len(self._memory))
            self._io.write(self._file, self._memory, flush=True).result()
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
            try:
                busy = executor.submit(self._run, traffic, seconds, done)
                yield
            finally:
                done.set()
            busy.result()

    def _run(self, traffic: Traffic, seconds: float, done: threading.Event) -> None:
        begun, moved, written, committed = time.perf_counter(), 0, 0, 0
        under_way: set[Future[Any]] = set()
        while not done.is_set():
            due_s = moved / traffic.total_bytes * seconds - (time.perf_counter() - begun)
            if done.wait(max(0.0, due_s)):
                break
            write = written * traffic.total_bytes < (moved + 1) * traffic.write_bytes
            commit = (
                write and committed * traffic.write_bytes < (written + 1) * traffic.commit_bytes
            )
            under_way.add(self._request(write=write, commit=commit))
            moved += self._piece_bytes
            written += write * self._piece_bytes
            committed += commit * self._piece_bytes
            if len(under_way) == min(_UNDER_WAY, self._pieces):
                ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for request in ended:
                    request.result()
        for request in under_way:
            request.result()

    def _request(self, *, write: bool, commit: bool) -> Future[Any]:
        offset = self._made % self._pieces * self._piece_bytes
        memory = self._memory[offset : offset + self._piece_bytes]
        self._made += 1
        if write:
            return self._io.write(self._file, memory, offset=offset, flush=commit, checksum=commit)
        return self._io.read(self._file, memory, offset=offset)


def with_io_cost(
    plan: Plan, config: Config, machine: Machine, batch: Mapping[str, Tensor], io: DirectIO
) -> Plan:
    """Return the plan with how many times as long its instructions take beside a step's I/O.

    One of each kind and class is executed alone and beside reads and writes of a file on the run's
    disk, as large as a chunk and as many a second as in the step that is forecast, turn and turn
    about. Left out where it is less than what is reckoned (`IOWork`, the processor's own seconds),
    where instructions are long, steps short or programs long, where a GPU computes or each read is
    verified, where memory or disk have no room, and where the disk refuses, which the run then says
    in its own words.
    """
    file = _scratch_file(config)
    with suppress(OSError):  # of a start that was killed
        file.unlink(missing_ok=True)
    builder, device = short_steps(plan.builder), plan.operations.device
    pending = plan.layouts.updated if builder.deferred else ()
    groups = sample_groups(plan.captured, builder.step(pending_updates=pending))
    seconds = instruction_seconds(plan)
    if (
        device.device.type != "cpu"
        or config.store.verify == "always"
        or len(plan.step) > _MOST_INSTRUCTIONS
        or sum(seconds(i) for group in groups for i in group) > _LONGEST_S
    ):
        return plan
    taken_bytes = max(slab_bytes(plan.layouts, group) for group in groups)
    taken_bytes = max(taken_bytes, plan.peaks.instruction_bytes)
    piece_bytes = _chunk_bytes(plan.layouts)
    pieces = min(plan.pool_bytes - taken_bytes, _MOST_BYTES) // piece_bytes
    free = free_bytes(file)
    if pieces < _LEAST_PIECES or (free is not None and free < 2 * pieces * piece_bytes):
        return plan
    forecast = price(plan, config, machine)
    traffic, step_s = forecast.traffic, forecast.step_s
    if traffic is None or not traffic.total_bytes or step_s is None or step_s < _SHORTEST_S:
        return plan
    alone, beside = (_dry_run(plan, batch) for _ in range(2))
    retain()
    try:
        with _StepIO(io, file, piece_bytes, pieces) as step_io:
            for step in range(2, 2 + _ROUNDS):  # in step 1 an optimizer makes its state
                for group in groups:
                    alone.sample(group, step)
                with step_io.beside(traffic, step_s):
                    for group in groups:
                        beside.sample(group, step)
    except (OSError, SwaptrainError):
        return plan
    finally:
        device.begin(-1)  # the copies that it keeps are of slabs that are gone
        release()
    found = replace(plan, beside_io=_step_s(plan, beside) / _step_s(plan, alone))
    found_s = price(found, config, machine).step_s
    return found if found_s is not None and found_s > step_s else plan


def _scratch_file(config: Config) -> Path:
    """Return a name that is the run's own, on the disk that it writes to."""
    if config.store.paths is None:
        return config.run.dir / "speed.tmp"
    return config.store.paths[0] / f"{run_token(config.run.dir)}.speed.tmp"


def _dry_run(plan: Plan, batch: Mapping[str, Tensor]) -> DryRun:
    clipped = plan.builder.deferred
    return DryRun(plan.captured, plan.layouts, plan.operations, batch, clipped=clipped)


def _step_s(plan: Plan, found: DryRun) -> float:
    """Return the seconds of a step whose instructions take what a dry run has found."""
    return sum(map(instruction_seconds(replace(plan, measured=found.measured)), plan.step))


def _chunk_bytes(layouts: Layouts) -> int:
    """Return the mean size of a chunk of the state, frozen weights included, in whole pages."""
    segments = (*layouts.state.values(), *layouts.frozen.values())
    arrays = [array for segment in segments for array in segment.arrays]
    mean = sum(array.nbytes for array in arrays) // max(1, sum(array.chunks for array in arrays))
    return max(1, mean // PAGE_BYTES) * PAGE_BYTES
