"""Forks a writer that commits two segments in turn, kills it ten times, and verifies the store."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from swaptrain.errors import DamagedStoreError
from swaptrain.program.tensors import TensorSpec
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.layout import SegmentLayout, lay_out
from swaptrain.store.format.state_record import state_record
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.store.slots.commit import Committer, Write
from swaptrain.store.slots.recovery_rules import Action, Found, decide, flush_everything
from swaptrain.store.slots.slots import Slots

ELEMENTS = 400_000
TENSOR = TensorSpec("w", (ELEMENTS,), (1,), "float32")
LAYOUT = SegmentLayout((lay_out("weights", "float32", [TENSOR], chunk_limit_bytes=2**18),))
ARRAY = LAYOUT.arrays[0]
RECORD_BYTES = 8192


def handoff(run: Path) -> ArrayFiles:
    """Return the hand-off of segment 2, in a row of its own."""
    return ArrayFiles(run / "handoff", "float32", 4096, 1, rows=1)


def aligned(nbytes: int) -> memoryview:
    """Return zeroed memory that starts at a page."""
    return memoryview(mmap.mmap(-1, nbytes))


def write(run: Path, ready: int) -> None:
    """Commit segments 2 and 1 of step after step until killed, from what recovery decides."""
    decision = recover(run)
    with DirectIO() as io:
        slots = Slots(run)
        slots.create(LAYOUT, 3, record_bytes=RECORD_BYTES)
        committer = Committer(io, slots)
        step, first = decision
        os.write(ready, b"x")
        while True:
            for k in (2, 1)[first:]:
                commit(run, slots, committer, k, step)
            step, first = step + 1, 0


def commit(run: Path, slots: Slots, committer: Committer, k: int, step: int) -> None:
    """Commit a segment whose every element is the step."""
    slot = committer.take(LAYOUT.shape_class)
    buffer, small = aligned(ARRAY.nbytes), aligned(4096)
    np.frombuffer(buffer, np.float32)[:] = step * 10 + k
    np.frombuffer(small, np.float32)[:] = step
    handoffs = [Write(handoff(run), small, row=0)] if k == 2 else []
    committer.commit(
        k,
        slot,
        lambda sums: state_record(
            segment=k,
            version=step,
            fingerprint="test",
            layout=LAYOUT,
            checksums=sums.arrays,
            handoff={
                "gradients": [
                    {"name": "h", "segment": k, "micro_batch": 0, "checksums": chunks}
                    for chunks in sums.handoff
                ]
            },
        ),
        committer.begin([Write(slot.array("weights"), buffer)]),
        handoffs,
    )


def create(run: Path) -> None:
    """Write version 0 of both segments."""
    run.mkdir()
    handoff(run).path.mkdir()
    handoff(run).create()
    with DirectIO() as io:
        slots = Slots(run)
        slots.create(LAYOUT, 3, record_bytes=RECORD_BYTES)
        with Committer(io, slots) as committer:
            for k in (2, 1):
                commit(run, slots, committer, k, 0)
            committer.drain()


def recover(run: Path) -> tuple[int, int]:
    """Verify everything live; return the step to go on with and how many commits it has."""
    flush_everything(run)
    versions, handoffs = [], set()
    with DirectIO() as io:
        slots = Slots(run)
        for k in (1, 2):
            slot = slots.live(k)
            record = slot.read_record(k)
            versions.append(record.version)
            buffer = aligned(ARRAY.nbytes)
            weights = slot.array("weights")
            for future in weights.read(io, buffer, checksums=record.checksums["weights"]):
                future.result()
            values = np.frombuffer(buffer, np.float32)
            assert (values == record.version * 10 + k).all()
            if gradients := record.handoff.gradients:
                try:
                    for future in handoff(run).read(
                        io, aligned(4096), row=0, checksums=gradients[0].checksums
                    ):
                        future.result()
                    handoffs.add((k, record.version))
                except DamagedStoreError:
                    continue  # being overwritten by the next step when that one was killed
    decision = decide(Found(tuple(versions), handoffs=frozenset(handoffs)))
    return decision.step, int(decision.action is Action.CONTINUE)


def main() -> None:
    """Kill ten writers, and print after each where the store is."""
    run = Path(sys.argv[1])
    create(run)
    rng = random.Random(0)
    for _ in range(10):
        reading, ready = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(run, ready)
            finally:
                os._exit(3)
        os.read(reading, 1)
        os.close(reading)
        os.close(ready)
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        step, commits = recover(run)
        print(json.dumps({"step": step, "commits": commits}), flush=True)


if __name__ == "__main__":
    main()
