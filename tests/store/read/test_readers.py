"""Readers beside a writer that commits all the time: whole steps, no damage, nobody waits long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.access.lock import lock_owner
from swaptrain.store.read.live_store import look
from swaptrain.store.read.reader import ChunkReader
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.inspection.report import read_run


@contextmanager
def writer(run: Path, *options: str) -> Iterator[int]:
    """Let another process commit into `run`; give its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.read.writer_driver", str(run), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        assert process.poll() is None, "the writer ended by itself"
    finally:
        process.communicate()
    assert process.returncode == 0


def step_of(path: Path) -> int:
    """Return the one step that a file's weights are of."""
    tensors = load_file(path)
    assert tensors.keys() == {"1.w", "2.w"}
    values = np.unique(np.concatenate(list(tensors.values())))
    assert len(values) == 1, f"a mixture of {values}"
    return int(values[0])


def test_every_export_of_a_running_run_is_one_step(tmp_path: Path) -> None:
    """The writer lets each one in at a step's end, and goes on; the file is that step's."""
    run, to = tmp_path / "run", tmp_path / "w.safetensors"
    steps, said = [], []
    with writer(run) as pid:
        for _ in range(15):
            steps.append(export_weights(run, to, None, note=said.append))
            assert step_of(to) == steps[-1]
            owner = lock_owner(run)
            assert owner is not None and owner.pid == pid
    assert steps == sorted(set(steps)), "each one is of a later step"
    assert any(f"pid {pid}" in text for text in said)
    assert not list(run.glob("export.*")) and not list(tmp_path.glob("*.partial"))


def test_readers_of_a_store_that_nothing_protects_get_a_whole_step_or_say_so(
    tmp_path: Path,
) -> None:
    """Against a writer that neither locks nor waits no export is a mixture, nor called damage."""
    run, to = tmp_path / "run", tmp_path / "w.safetensors"
    done = 0
    with writer(run, "alone"):
        for _ in range(10):
            try:
                step = export_weights(run, to, None)
            except RunError as error:
                assert "changes while it is read" in str(error) or "inside step" in str(error)
            else:
                assert step_of(to) == step
                done += 1
        chunks = 0
        for _ in range(30):
            store = look(run)
            assert store is not None
            for live in store.segments:
                assert live.state is not None and live.record is not None
                sums = live.record.checksums["weights_float32"]
                array = live.state.array("weights_float32")
                reader = ChunkReader(array, sums, segment=live.segment)
                try:
                    values = reader.read(0, 60_000)
                except DamagedStoreError:
                    assert store.has_changed()
                else:
                    assert (values == live.version).all()
                    chunks += 1
    assert chunks > 5
    assert export_weights(run, to, None) == step_of(to)


def test_inspect_beside_a_writer_never_sees_damage(tmp_path: Path) -> None:
    """A hundred looks at a store whose steps are shorter than a look."""
    run = tmp_path / "run"
    with writer(run) as pid:
        seen = [read_run(run, lines=1) for _ in range(40)]
    assert all(report.writer is not None and f"pid {pid}" in report.writer for report in seen)
    done = [report.done for report in seen]
    assert done == sorted(done) and done[-1] > done[0]
    assert read_run(run).writer is None
