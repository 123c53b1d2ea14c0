"""What other programs are shown of a run: each step once, and nothing that a run waits for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from swaptrain.cli import main
from swaptrain.config.load import load_config
from swaptrain.errors import ConfigError
from swaptrain.observe import reports
from swaptrain.observe.reports import Reports, import_reporters, next_rows
from swaptrain.observe.scalars import scalars
from swaptrain.observe.tensorboard_events import TensorboardEvents
from tests.support.runs import config_of, rows, trained

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt"},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"host": "64MiB", "segment": "16KiB"},
    "train": {"steps": 3, "threads": 1, "check_capture": False},
}


def reporting(base: Path, name: str, steps: int, **options: Any) -> Path:
    """Train a run that reports, with snapshots."""
    train = {**GPT["train"], "report_to": name, "steps": steps}
    tree = {**GPT, "train": train, "store": {"keep": {"every": 2}}}
    return trained(config_of(base / "mine", tree), **options)


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a folder: steps and values by name."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = found.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in names}


def as_shown(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return what it has to show of rows: numbers in float32."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in lines:
        for name, value in scalars(row).items():
            found.setdefault(name, []).append((row["step"], float(np.float32(value))))
    return found


def line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "ended_at": 1.7e9 + step, **values}


def append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in lines)


def reported(path: Path, done: int, notes: list[str] | None = None) -> None:
    """Report what a file has, as a start does that finds `done` steps."""
    found: list[str] = [] if notes is None else notes
    with_events = Reports([TensorboardEvents(path.parent / "tb")], path, found.append)
    with_events.start(done)
    with_events.close()
    assert notes is not None or found == []


@pytest.mark.parametrize("value", [None, True, "text", [1.0], {"a": 1}])
def test_only_numbers_are_scalars(value: Any) -> None:
    """A loss that is not finite is null in the file; there is no point to draw then."""
    assert scalars(line(3, odd=value, tokens=7)) == {"loss": 1 / 3, "tokens": 7}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_each_step_is_shown_once_with_its_last_value(starts: list[tuple[int, int]]) -> None:
    """However often a run goes on, goes back, or is killed with its last rows unreported."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "metrics.jsonl"
        kept: list[dict[str, Any]] = []
        for number, (steps, back) in enumerate(starts):
            done = max(0, len(kept) - back)
            kept = kept[:done] + [line(done + k, start=number) for k in range(1, steps + 1)]
            path.unlink(missing_ok=True)
            append(path, kept[: done + (steps + 1) // 2])  # a later start catches up the rest
            reported(path, done)
            append(path, kept[done + (steps + 1) // 2 :])
        reported(path, len(kept))
        assert shown(Path(name) / "tb") == as_shown(kept)


def test_a_torn_file_of_events_is_gone_on_from(tmp_path: Path) -> None:
    """A kill leaves its last record in part."""
    path = tmp_path / "metrics.jsonl"
    lines = [line(k) for k in range(1, 5)]
    append(path, lines)
    reported(path, 4)
    (file,) = (tmp_path / "tb").iterdir()
    os.truncate(file, file.stat().st_size - 5)
    reported(path, 4)
    assert shown(tmp_path / "tb") == as_shown(lines)
    assert len(list((tmp_path / "tb").iterdir())) == 2


def test_rows_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    """What is being appended is read when its line ends."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step"')
    found, offset = next_rows(path, 0)
    assert (found, offset) == ([{"step": 1}], 12)
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    found, offset = next_rows(path, offset)
    assert (found, offset) == ([{"step": 2}], 24)
    append(path, [line(k) for k in range(3, 1500)])
    count = 2
    while True:
        found, offset = next_rows(path, offset)
        if not found:
            break
        assert found[0]["step"] == count + 1
        count += len(found)
    assert count == 1499 and offset == path.stat().st_size


class Failing:
    """A reporter that raises, or that waits."""

    name = "tensorboard"

    def __init__(self, fails: str, wait: threading.Event | None = None) -> None:
        self._fails, self._wait = fails, wait

    def begin(self, done: int) -> int:
        return self._now("begin")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._now("write")

    def close(self) -> None:
        self._now("close")

    def _now(self, what: str) -> int:
        if what == self._fails:
            if self._wait is None:
                raise OSError(28, "No space left\non device")
            self._wait.wait()
        return 0


@pytest.mark.parametrize("fails", ["begin", "write", "close"])
def test_a_reporter_that_fails_is_one_note(fails: str, tmp_path: Path) -> None:
    """The others take all rows."""
    path, notes = tmp_path / "metrics.jsonl", list[str]()
    append(path, [line(1), line(2)])
    both = Reports([Failing(fails), TensorboardEvents(tmp_path / "tb")], path, notes.append)
    both.start(2)
    both.close()
    assert len(notes) == 1 and "\n" not in notes[0]
    assert "No space left on device): the run goes on without it" in notes[0]
    assert shown(tmp_path / "tb") == as_shown([line(1), line(2)])


def test_a_reporter_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end it is said that it has not taken the last rows; the next start gives them."""
    path, notes, wait = tmp_path / "metrics.jsonl", list[str](), threading.Event()
    append(path, [line(1)])
    monkeypatch.setattr(reports, "_LAST_S", 0.1)
    late = Reports([Failing("write", wait)], path, notes.append)
    late.start(1)
    late.close()
    late.close()
    wait.set()
    assert len(notes) == 1 and "tensorboard has not taken the last rows within 0.1 s" in notes[0]


@pytest.mark.proof
@pytest.mark.trains
def test_a_run_is_shown_through_its_ends_and_starts(tmp_path: Path) -> None:
    """It goes back to a snapshot, starts over, and is finished when the folder is lost."""

    def train_to(steps: int, **options: Any) -> Path:
        run = reporting(tmp_path, "tensorboard", steps, **options)
        assert shown(run / "tensorboard") == as_shown(rows(run))
        return run

    train_to(3)
    train_to(4, from_step=2)
    run = train_to(1, fresh=True)
    assert len(list((run / "tensorboard").iterdir())) == 1
    shutil.rmtree(run / "tensorboard")
    train_to(1)
    assert main(["verify", str(run)]) == 0 and main(["inspect", str(run)]) == 0


@pytest.mark.trains
@pytest.mark.proof
def test_trackio_has_each_step_once(tmp_path: Path) -> None:
    """Its folder is fixed when it is imported, so that this is a process of its own."""
    program = """
import json, sqlite3, sys
from pathlib import Path
from tests.observe.test_reports import reporting, rows
base = Path(sys.argv[1])
def train_to(steps, **options):
    run = reporting(base / "runs", "trackio", steps, **options)
    name = (run / "trackio").read_text()
    data = sqlite3.connect(base / "trackio" / "runs.db")
    query = "select step, metrics from metrics where run_name = ? order by id"
    found = [(step, json.loads(text)["loss"]) for step, text in data.execute(query, (name,))]
    assert found == [(row["step"], row["loss"]) for row in rows(run)], found
    return name
first = train_to(3)
assert first == train_to(5) and first.startswith("mine-")
back = train_to(6, from_step=4)
assert len({first, back, train_to(2, fresh=True)}) == 3
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what to install."""
    config_of(tmp_path / "run", {**GPT, "train": {"steps": 1, "report_to": ["trackio"]}})
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert main(["--config", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'swaptrain[trackio]'" in said
    assert not (tmp_path / "run").exists()


def test_a_package_that_does_not_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises when it is imported."""
    (tmp_path / "trackio.py").write_text("raise RuntimeError('wrong\\nversion')")
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be imported \(RuntimeError: wrong version\)"):
        import_reporters(["trackio"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tensorbord", "did you mean tensorboard?"),
        ("wandb", "choose tensorboard or trackio"),
        ("[tensorboard, none]", "[] for none"),
        ("3", "wanted a list of names"),
    ],
)
def test_an_unknown_name_gives_the_nearest(given: str, said: str, tmp_path: Path) -> None:
    """In a list, and alone."""
    config_of(tmp_path / "run", GPT)
    with pytest.raises(ConfigError, match=r"train\.report_to: found") as caught:
        load_config(tmp_path / "run.yaml", [f"train.report_to={given}"])
    assert said in str(caught.value)
