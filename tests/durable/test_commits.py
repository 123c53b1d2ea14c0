"""What is written while a step goes on is what was meant to be written."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import swaptrain.verbs.train as training
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.memory.slab import Slab
from swaptrain.planning.prepare import Prepared
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.record import read_record
from swaptrain.store.slots.commit import Write
from tests.support.matrix import proof_but
from tests.support.runs import config_of, rows, trained

pytestmark = pytest.mark.trains

TREE: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"segment": "4KiB"},
    "train": {"steps": 2},
}
MODES: dict[str, dict[str, Any]] = {
    "fused": TREE,
    "clipped": {
        **TREE,
        "model": {"python": "tests.support.models:gpt"},  # without buffers, whose update waits
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"segment": "64KiB"},
        "optimizer": {"clip_norm": 0.3},
    },
    "trees": {**TREE, "store": {"commit": {"every": 2}}},
}


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the slabs a few times what the largest instruction needs, far less than the state."""

    class Small(Prepared):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pool_bytes = self.plan.peaks.instruction_bytes * 4
            self.plan = dataclasses.replace(self.plan, pool_bytes=pool_bytes)

    monkeypatch.setattr(training, "Prepared", Small)


@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize("mode", proof_but(MODES, "clipped"))
def test_no_buffer_changes_while_it_is_written(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, though slow, finds in its buffer what was there when it was asked for."""
    original, original_finished_write = DirectIO.write, DiskBacking.finished_write
    promised: dict[int, int] = {}
    changed: list[Path] = []
    lock = threading.Lock()

    def finished_write(self: DiskBacking, key: ObjectKey, slab: Slab) -> Write:
        if key.kind is Kind.ACCUMULATOR:
            # Its write begins later, on the committer's thread.
            promised[address(slab.memory)] = xxhash.xxh3_64_intdigest(slab.memory)
        return original_finished_write(self, key, slab)

    def write(self: DirectIO, path: Path, buffer: memoryview, **options: Any) -> Future[int]:
        before = xxhash.xxh3_64_intdigest(buffer)

        def slow() -> int:
            time.sleep(0.05 if "accumulators" in path.parts else 0.002)
            expected = promised.pop(address(buffer), before)
            digest = original(self, path, buffer, **options).result()
            time.sleep(0.001)
            found = {before, expected, xxhash.xxh3_64_intdigest(buffer)}
            if options.get("checksum", True):
                found.add(digest)
            if len(found) > 1:
                with lock:
                    changed.append(path)
            return digest

        future: Future[int] = Future()

        def run() -> None:
            try:
                future.set_result(slow())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run).start()
        return future

    monkeypatch.setattr(DirectIO, "write", write)
    monkeypatch.setattr(DiskBacking, "finished_write", finished_write)
    config = config_of(tmp_path / "run", MODES[mode])
    trained(config)
    assert not changed
    assert len(rows(config.run.dir)) == 2


def test_a_record_has_the_step_and_the_losses_and_norms_of_its_segment(tmp_path: Path) -> None:
    """What a resumed run needs of a step is in the records of its commits."""
    config = config_of(tmp_path / "run", TREE)
    run_dir = trained(config)
    norms: dict[str, float] = {}
    for link in sorted((run_dir / "store" / "segments").glob("0*")):
        record = read_record(link / "zarr.json")
        assert record["version"] == 2
        assert sum(record["losses"]) / 3 == pytest.approx(rows(run_dir)[1]["loss"])
        norms.update(record["norms"])
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(
        rows(run_dir)[1]["grad_norm"]
    )
    assert "first.weight" in norms and "unused" not in norms
