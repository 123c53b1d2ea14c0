"""trace.json: whole at every moment between two steps, complete, and of no weight for the run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swaptrain.errors import RunError
from swaptrain.execute.train import train
from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.observe.trace import TraceFile
from swaptrain.program.instructions import Instruction
from swaptrain.spans import Recorder, span
from tests.support.runs import config_of, losses, rows, trained

GPT = {
    "model": {"python": "tests.support.models:gpt"},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"host": "64MiB", "segment": "16KiB"},
}


def events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a trace."""
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def metrics(step: int, **numbers: Any) -> StepMetrics:
    """Return the metrics of a step."""
    return StepMetrics(step=step, loss=1.0, lr=0.1, tokens=1, step_s=0.5, **numbers)


def refused(text: str) -> None:
    """Take the note of a trace that nothing should go wrong with."""
    raise AssertionError(text)


def test_a_run_is_traced_whole(tmp_path: Path) -> None:
    """Every instruction of the steps that are traced is there, and every byte; then it ends."""
    seen: list[tuple[int, str]] = []

    def observe(step: int, instruction: Instruction) -> None:
        seen.append((step, str(instruction)))

    config = config_of(tmp_path / "run", {**GPT, "run": {"dir": str(tmp_path / "run"), "trace": 2}})
    run = trained(config, observe=observe)
    found = events(run / "trace.json")
    steps = [event for event in found if event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == ["step 1", "step 2"]
    assert [event["args"]["loss"] for event in steps] == losses(run)[:2]
    traced = Counter(event["args"]["of"] for event in found if "of" in event.get("args", {}))
    for name, count in Counter(name for step, name in seen if step <= 2).items():
        assert traced[name] == count, name
    for step, row in zip(steps, rows(run), strict=False):
        end = step["ts"] + step["dur"]
        reads = [e for e in found if e["name"] == "read" and step["ts"] <= e["ts"] < end]
        assert sum(event["args"]["bytes"] for event in reads) == row["read_bytes"]
    commits = [event for event in found if event["name"] == "commit"]
    assert len(commits) >= len({event["args"]["of"] for event in commits}) > 1
    assert Recorder().take() == [], "a finished trace records no more"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    """Let no test leave a recorder behind."""
    yield
    if Recorder._current is not None:
        Recorder._current.close()


def test_a_run_that_fails_records_no_more(tmp_path: Path) -> None:
    """What was traced until then stays, as a whole list."""

    def observe(step: int, _: Instruction) -> None:
        if step == 2:
            raise RunError("the disk is gone")

    config = config_of(tmp_path / "run", {**GPT, "run": {"dir": str(tmp_path / "run"), "trace": 9}})
    with pytest.raises(RunError, match="gone"):
        train(config, observe=observe)
    assert Recorder._current is None
    assert "step 1" in {event["name"] for event in events(tmp_path / "run" / "trace.json")}


def test_a_start_without_a_trace_leaves_the_last_one(tmp_path: Path) -> None:
    """`--fresh` takes it away with everything else."""
    folder = str(tmp_path / "run")
    trained(config_of(tmp_path / "run", {**GPT, "run": {"dir": folder, "trace": 1}}))
    longer = config_of(tmp_path / "run", {**GPT, "train": {"steps": 6, "seed": 3, "threads": 1}})
    trained(longer)
    assert (tmp_path / "run" / "trace.json").exists()
    trained(longer, fresh=True)
    assert not (tmp_path / "run" / "trace.json").exists()


def test_the_file_is_whole_behind_each_step(tmp_path: Path) -> None:
    """Steps are added; an older file, longer than the new one, is replaced."""
    path = tmp_path / "trace.json"
    path.write_text("x" * 10_000)
    trace = TraceFile(path, 3, refused)
    for step in (1, 2):
        with span("forward", "forward(1, 0)", 5):
            pass
        trace.step_done(metrics(step))
        found = events(path)
        assert [event["name"] for event in found] == ["forward", "step 1", "forward", "step 2"][
            : 2 * step
        ]
    trace.close()
    with span("forward"):
        pass
    trace.step_done(metrics(3))
    assert len(events(path)) == 4


def test_much_that_is_recorded_is_written_within_a_step(tmp_path: Path) -> None:
    """A step of a million instructions does not pile up in memory."""
    trace = TraceFile(tmp_path / "trace.json", 1, refused)
    for _ in range(20_000):
        with span("forward"):
            pass
        trace.instruction_begins()
        assert len(trace._recorder) <= 4_001
    trace.step_done(metrics(1, grad_norm=float("inf")))
    found = events(tmp_path / "trace.json")
    assert len(found) == 20_001
    assert "grad_norm" not in found[-1]["args"], "JSON has no infinity"


def test_a_disk_that_refuses_ends_the_trace_with_one_note(tmp_path: Path) -> None:
    """The run goes on; what waits is not kept."""
    notes: list[str] = []
    trace = TraceFile(tmp_path / "missing" / "trace.json", 5, notes.append)
    for step in (1, 2):
        with span("forward"):
            pass
        trace.step_done(metrics(step))
    assert len(notes) == 1
    assert "No such file or directory" in notes[0]
    assert "goes on without it" in notes[0]
    assert Recorder._current is None
    assert not len(trace._recorder)


def test_nobody_records_twice(tmp_path: Path) -> None:
    """Two runs in one process would mix their spans."""
    trace = TraceFile(tmp_path / "trace.json", 1, refused)
    with pytest.raises(RuntimeError, match="already"):
        TraceFile(tmp_path / "other.json", 1, refused)
    trace.close()
