"""starts.jsonl: what a start says of itself, and that it never stops a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swaptrain.observe.starts import Expected, StartLine, read_starts, record_start
from swaptrain.verbs.train import train
from tests.support.runs import config_of, rows, step_write_bytes

LINE = StartLine(
    time=1.5,
    host="h",
    pid=1,
    versions={"torch": "2"},
    machine={"processor": "p"},
    device="cpu",
    threads=2,
    parameters=3,
    segments=1,
    first_step=1,
    last_step=5,
    forecast=Expected(
        step_s=None,
        compute_s=1.0,
        read_bytes=None,
        write_bytes=None,
        least_traffic_bytes=2.0,
        host_bytes=3,
        base_bytes=4,
        pool_bytes=5,
        arena_bytes=6,
        peak_host_bytes=7,
        segments_saving=0,
    ),
)


def fails(text: str) -> None:
    raise AssertionError(text)


def test_lines_are_added(tmp_path: Path) -> None:
    """One for each start; a line that a crash tore is closed and left out."""
    path = tmp_path / "starts.jsonl"
    record_start(path, LINE, fails)
    with path.open("ab") as file:
        file.write(b'{"time": 3, "ho')
    record_start(path, LINE, fails)
    found = read_starts(path)
    assert len(found) == 2 and found[0] == found[1]
    assert found[0]["forecast"]["peak_host_bytes"] == 7 and found[0]["forecast"]["step_s"] is None
    assert path.read_bytes().count(b"\n") == 3
    assert read_starts(tmp_path / "none") == []


def test_a_line_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    """The run goes on: a directory that is gone, one in the place of the file, a full disk."""
    notes: list[str] = []
    record_start(tmp_path / "gone" / "starts.jsonl", LINE, notes.append)
    (tmp_path / "starts.jsonl").mkdir()
    record_start(tmp_path / "starts.jsonl", LINE, notes.append)
    record_start(Path("/dev/full"), LINE, notes.append)
    assert len(notes) == 3 and all("the run goes on without this line" in note for note in notes)
    assert "No space left on device" in notes[2]


@pytest.mark.trains
def test_each_start_of_a_run_writes_one(tmp_path: Path) -> None:
    """With its step and its forecast; one with nothing to do writes none, --fresh takes them."""
    tree = {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"host": "64MiB", "segment": "16KiB"},
    }
    config = config_of(tmp_path / "run", {**tree, "train": {"steps": 2}})
    train(config)
    train(config)
    longer = config_of(tmp_path / "run", {**tree, "train": {"steps": 3}})
    train(longer)
    path = config.run.dir / "starts.jsonl"
    first, second = read_starts(path)
    assert (first["first_step"], first["last_step"]) == (1, 2)
    assert (second["first_step"], second["last_step"]) == (3, 3)
    assert first["pid"] == os.getpid() and first["versions"]["torch"]
    assert first["time"] <= rows(config.run.dir)[0]["ended_at"] < second["time"]
    forecast = second["forecast"]
    assert forecast["host_bytes"] == 64 << 20
    assert forecast["pool_bytes"] + forecast["arena_bytes"] <= 64 << 20
    assert forecast["peak_host_bytes"] <= 64 << 20
    step = rows(config.run.dir)[1]
    assert forecast["write_bytes"] == pytest.approx(step_write_bytes(config.run.dir), rel=0.1)
    assert forecast["least_traffic_bytes"] <= step["read_bytes"] + step["write_bytes"]
    path.write_text("nothing that a start reads\n" + json.dumps({"time": "now"}))
    train(longer, fresh=True)
    (line,) = read_starts(path)
    assert line["first_step"] == 1
