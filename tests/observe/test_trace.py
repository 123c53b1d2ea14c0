"""trace.json: whole at every moment between two steps, complete, and of no weight for the run."""

from __future__ import annotations

import errno
import json
from collections import Counter
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from swaptrain.errors import RunError
from swaptrain.observe.trace import TraceFile
from swaptrain.program.instructions import Instruction
from swaptrain.spans import Recorder, span
from swaptrain.verbs.train import train
from tests.support.runs import config_of, losses, rows, trained

pytestmark = pytest.mark.trains

GPT = {
    "model": {"python": "tests.support.models:gpt"},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"host": "64MiB", "segment": "16KiB"},
}


def events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a trace."""
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


class Notes(list[str]):
    """The notes of a trace that nothing goes wrong with."""

    def __call__(self, text: str) -> None:
        assert "cannot" not in text
        self.append(text)


def test_a_run_is_traced_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every instruction of the steps that are traced is there, and every byte; then it ends."""
    seen: list[tuple[int, str]] = []

    def observe(step: int, instruction: Instruction) -> None:
        seen.append((step, str(instruction)))

    config = config_of(tmp_path / "run", {**GPT, "run": {"dir": str(tmp_path / "run"), "trace": 2}})
    run = trained(config, observe=observe)
    found = events(run / "trace.json")
    steps = [event for event in found if event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == ["step 1", "step 2"]
    assert len(losses(run)) == 5
    traced = Counter(event["args"]["of"] for event in found if "of" in event.get("args", {}))
    for name, count in Counter(name for step, name in seen if step <= 2).items():
        assert traced[name] == count, name
    for step, row in zip(steps, rows(run), strict=False):
        end = step["ts"] + step["dur"]
        reads = [e for e in found if e["name"] == "read" and step["ts"] <= e["ts"] < end]
        assert sum(event["args"]["bytes"] for event in reads) == row["read_bytes"]
    commits = [event for event in found if event["name"] == "commit"]
    updates = [event for event in found if event["name"] == "update"]
    assert len(commits) >= len(updates) - 1 > 1, "the last one may end behind the trace"
    assert Recorder().take() == [], "a finished trace records no more"
    capsys.readouterr()
    trained(config)
    assert "no step is left that run.trace could write of" in capsys.readouterr().out


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


@pytest.mark.proof
def test_a_start_without_a_trace_leaves_the_last_one(tmp_path: Path) -> None:
    """`--fresh` takes it away with everything else."""
    folder = str(tmp_path / "run")
    trained(config_of(tmp_path / "run", {**GPT, "run": {"dir": folder, "trace": 1}}))
    longer = config_of(tmp_path / "run", {**GPT, "train": {"steps": 6, "seed": 3, "threads": 1}})
    trained(longer)
    assert (tmp_path / "run" / "trace.json").exists()
    trained(longer, fresh=True)
    assert not (tmp_path / "run" / "trace.json").exists()


@pytest.mark.proof
def test_a_step_that_evaluates_is_where_it_was(tmp_path: Path) -> None:
    """Its span holds its own instructions, and none of the evaluation behind it."""
    tree = {**GPT, "eval": {"python": "tests.support.datasets:tokens", "every": 1, "batches": 9}}
    run = {"dir": str(tmp_path / "run"), "trace": 5}
    found = events(trained(config_of(tmp_path / "run", {**tree, "run": run})) / "trace.json")
    for step in (event for event in found if event["name"].startswith("step ")):
        end = step["ts"] + step["dur"]
        inside = Counter(e["name"] for e in found if step["ts"] <= e["ts"] < end)
        assert inside["evaluate"] == 0
        assert inside["turn"] == 3, "one for each micro-batch"


def test_the_file_is_whole_behind_each_step(tmp_path: Path) -> None:
    """What was recorded is added; an older file, longer than the new one, is replaced."""
    path = tmp_path / "trace.json"
    path.write_text("x" * 10_000)
    trace = TraceFile(path, 3, Notes())
    for step in (1, 2):
        with span("forward", path, 5):
            pass
        trace.step_done()
        assert Counter(event["name"] for event in events(path))["forward"] == step
    assert events(path)[0]["args"] == {"of": "trace.json", "bytes": 5}
    with span("backward"):
        pass
    trace.close()
    with span("update"):
        pass
    trace.step_done()
    assert events(path)[-1]["name"] == "backward"


def test_what_ends_behind_the_last_step_is_written_too(tmp_path: Path) -> None:
    """A commit runs on; what begins then is not of the steps that were asked for."""
    trace = TraceFile(tmp_path / "trace.json", 1, notes := Notes())
    with span("commit"):
        trace.step_done()
        with span("forward"):
            pass
    trace.close()
    assert [event["name"] for event in events(tmp_path / "trace.json")] == ["commit"]
    assert len(notes) == 1
    assert "has one step" in notes[0]


def test_much_that_is_recorded_is_written_within_a_step(tmp_path: Path) -> None:
    """A step of a million instructions does not pile up in memory."""
    trace = TraceFile(tmp_path / "trace.json", 1, Notes())
    for _ in range(20_000):
        with span("forward"):
            pass
        trace.instruction_begins()
        assert len(trace._recorder) <= 2_001
    trace.step_done()
    counts = Counter(event["name"] for event in events(tmp_path / "trace.json"))
    assert counts["forward"] == 20_000
    assert counts["write the trace"] == 9


def test_a_directory_that_is_gone_ends_the_trace_with_one_note(tmp_path: Path) -> None:
    """The run goes on; what waits is not kept."""
    notes: list[str] = []
    trace = TraceFile(tmp_path / "missing" / "trace.json", 5, notes.append)
    for _ in range(2):
        with span("forward"):
            pass
        trace.step_done()
    trace.close()
    assert len(notes) == 1
    assert "No such file or directory" in notes[0]
    assert "goes on without it" in notes[0]
    assert Recorder._current is None
    assert not len(trace._recorder)


def test_a_disk_that_fills_up_leaves_what_was_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written in part is cut off: the file is a list as behind the step before."""
    path, notes = tmp_path / "trace.json", []
    trace = TraceFile(path, 5, notes.append)
    with span("forward"):
        pass
    trace.step_done()
    whole = events(path)
    write = FileIO.write

    class Full(FileIO):
        def write(self, content: Any) -> int:
            if len(content) < 20:
                return write(self, content)
            write(self, bytes(content)[:-10])
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "open", lambda self, mode: Full(self, mode.replace("b", "")))
    with span("backward"):
        pass
    trace.step_done()
    monkeypatch.undo()
    trace.close()
    assert len(notes) == 1
    assert "No space left on device" in notes[0]
    assert events(path) == whole


def test_nobody_records_twice(tmp_path: Path) -> None:
    """Two runs in one process would mix their spans."""
    trace = TraceFile(tmp_path / "trace.json", 1, Notes())
    with pytest.raises(RuntimeError, match="already"):
        TraceFile(tmp_path / "other.json", 1, Notes())
    trace.close()
