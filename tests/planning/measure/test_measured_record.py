"""What a start measured is taken by the next one, where nothing that it depends on has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swaptrain.planning.measure.measured import Measured
from swaptrain.planning.measure.measured_record import MeasuredRecord
from swaptrain.planning.measure.sampler import Sampler
from swaptrain.program.instructions import Operation
from tests.support.runs import config_of, losses, trained

GPT = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "train": {"check_capture": False},
}


def job(run: Path, steps: int, host: str = "64MiB") -> Any:
    memory = {"host": host, "segment": "16KiB"}
    return config_of(run, {**GPT, "memory": memory, "train": {"steps": steps}})


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rounds in which instructions are run before a start trains, one entry each."""
    found: list[int] = []
    sample = Sampler.sample

    def counted(self: Sampler, instructions: Any, step: int) -> None:
        found.append(step)
        sample(self, instructions, step)

    monkeypatch.setattr(Sampler, "sample", counted)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return found


@pytest.mark.trains
def test_a_start_takes_what_the_one_before_measured(tmp_path: Path, samples: list[int]) -> None:
    """One round instead of all; another budget, or a file of nonsense, is measured anew."""
    run = trained(job(tmp_path / "run", 2))
    first = len(samples)
    assert set(samples) == {1, 2, 3}
    kept = (run / "measured.json").read_bytes()
    samples.clear()
    trained(job(tmp_path / "run", 3))
    assert set(samples) == {1} and 3 * len(samples) == first
    assert (run / "measured.json").read_bytes() == kept
    samples.clear()
    trained(job(tmp_path / "run", 4, host="80MiB"))
    assert set(samples) == {1, 2, 3}
    assert (run / "measured.json").read_bytes() != kept
    (run / "measured.json").write_text("[")
    samples.clear()
    trained(job(tmp_path / "run", 5))
    assert set(samples) == {1, 2, 3}
    assert losses(run) == losses(trained(job(tmp_path / "other", 5)))


def record(path: Path, config: Any) -> MeasuredRecord:
    return MeasuredRecord(path / "measured.json", config, "0123", [1, 2])


def test_only_figures_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written comes back; a value of another kind, or of a busy machine, does not."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    config = job(tmp_path / "run", 2)
    kind = (Operation.FORWARD, 0, False)
    measured = Measured(
        arena_bytes=7, seconds={kind: 0.5}, decoding_s={1: 0.25}, own_bytes={kind: 9}, tier_s=0.125
    )
    record(tmp_path, config).write(measured)
    assert record(tmp_path, config).read() == measured
    path = tmp_path / "measured.json"
    tree = json.loads(path.read_text())
    wrong: list[dict[str, Any]] = [
        *({"arena_bytes": value} for value in (-1, 1.5, True, None, 2**70)),
        *({"tier_s": value} for value in ("1", -0.5, 1e300, [])),
        *({"seconds": value} for value in (7, [["sing", 0, False, 1.0]], [["forward", 0, False]])),
        *({"key": "", "busy": False}, {"busy": True}),
    ]
    for change in wrong:
        path.write_text(json.dumps({**tree, **change}))
        assert record(tmp_path, config).read() is None, change
    path.write_text(json.dumps({**tree, "busy": True}))
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    assert record(tmp_path, config).read() == measured, "no better can be had now"
