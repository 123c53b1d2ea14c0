"""One writer, many readers, with real processes: one run that is refused, read, and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from swaptrain.store.access.lock import lock_owner
from tests.support.killing import metrics_key

pytestmark = pytest.mark.trains

TREE: dict[str, Any] = {
    "model": {
        "python": "tests.support.models:gpt",
        "kwargs": {"layers": 2, "width": 64, "dropout": 0.1},
    },
    "data": {
        "python": "tests.support.datasets:tokens",
        "micro_batch": 2,
        "micro_batches": 2,
        "shuffle": False,
    },
    "optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 0.5},
    "train": {"steps": 100_000, "seed": 3, "threads": 1},
    "device": "cpu",
    "memory": {"host": "256MiB", "segment": "64KiB"},
}


class Job:
    """A config file, and the commands on its run."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.config = folder / "job.yaml"
        self.config.write_text(yaml.safe_dump({**TREE, "run": {"dir": str(self.run)}}))
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "swaptrain", *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(command, text=True, env=self.environment, **options)

    def train(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return self.start("--config", str(self.config), *arguments, **options)

    def lines(self) -> int:
        file = self.run / "metrics.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0


def wait_for(condition: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    for _ in range(2400):
        if condition():
            return
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it did not come")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    yield Job(tmp_path)


@pytest.mark.proof
def test_a_run_and_those_beside_it(job: Job, tmp_path: Path) -> None:
    """Refused: a second trainer and a fresh start, also while the first one captures its model.

    Served: inspect, plan and export of a run that goes on; and a stop, which flushes the update
    that waits, so that an export of the stopped run is of the same step.
    """
    first = job.train()
    wait_for(lambda: lock_owner(job.run) is not None, first)
    second, fresh = job.train(), job.train("--fresh")
    for refused in (second, fresh):
        _, error = refused.communicate()
        assert refused.returncode == 1
        assert f"in use by another process (pid {first.pid}, host {os.uname().nodename})" in error
    wait_for(lambda: job.lines() > 2, first)
    to = tmp_path / "w.safetensors"
    readers = {
        "inspect": job.start("inspect", str(job.run)),
        "plan": job.start("plan", "--config", str(job.config)),
        "export": job.start("export", str(job.run), "--to", str(to)),
    }
    said = {}
    for name, reader in readers.items():
        said[name], error = reader.communicate()
        assert reader.returncode == 0, error
    assert f"training (pid {first.pid}" in said["inspect"]
    step = re.search(r"as they are after step (\d+)\n", said["export"])
    assert step is not None and f"pid {first.pid}" in said["export"]
    assert "embedding.weight" in load_file(to) or len(load_file(to)) > 5
    before = job.lines()
    wait_for(lambda: job.lines() > before, first)
    first.send_signal(signal.SIGTERM)
    out, error = first.communicate()
    assert first.returncode == 143
    assert re.match(r"stopping after segment \d+/\d+", error)
    assert f"waiting while the weights of step {step[1]} are read" in out
    stopped = job.start("export", str(job.run), "--to", str(to))
    out, error = stopped.communicate()
    assert stopped.returncode == 0, error
    assert int(step[1]) < int(out.rpartition(" ")[2]) == job.lines()


@pytest.mark.proof
def test_nobody_who_listens_is_no_reason_to_end(job: Job) -> None:
    """A closed pipe behind the output, and behind the errors, changes neither steps nor exit."""
    process = job.train("train.steps=4")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == 0
    assert [row[0] for row in metrics_key(job.run)] == [1, 2, 3, 4]
    assert json.loads((job.run / "metrics.jsonl").read_text().splitlines()[-1])["loss"] > 0
