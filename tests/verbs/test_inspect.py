"""The verb inspect: what a run directory holds, whatever state it is in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, RunError
from swaptrain.store.access.lock import RunLock
from swaptrain.store.format.root import FORMAT, create_root, read_root
from swaptrain.store.slots.slots import Slots
from swaptrain.verbs.inspection.report import read_run
from swaptrain.verbs.plan import plan
from swaptrain.verbs.train import train
from tests.support.runs import config_of

pytestmark = pytest.mark.trains


def job(run_dir: Path, **sections: Any) -> Config:
    """Return the config of a small run of several segments."""
    return config_of(
        run_dir,
        {
            "model": {"python": "tests.support.models:gpt"},
            "data": {"python": "tests.support.datasets:tokens"},
            "train": {"steps": 3},
            "memory": {"host": "64MiB", "segment": "16KiB"},
            **sections,
        },
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run; tests that change it take a copy."""
    config = job(tmp_path_factory.mktemp("finished") / "run")
    train(config)
    return config.run.dir


def killed_after(switches: int, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the disk fails in the switch of that number."""
    done = 0
    switch = Slots.switch

    def failing(slots: Slots, *args: Any, **options: Any) -> None:
        nonlocal done
        done += 1
        if done > switches:
            raise RunError("the disk has gone")
        switch(slots, *args, **options)

    monkeypatch.setattr(Slots, "switch", failing)
    with pytest.raises(RunError):
        train(config)
    monkeypatch.undo()


def listing(path: Path) -> list[tuple[Path, int, int]]:
    return [(p, p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(path.rglob("*"))]


def test_a_finished_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, progress, segments with versions and slots, disk, metrics; and nothing is written."""
    before = listing(finished)
    assert main(["inspect", str(finished)]) == 0
    assert listing(finished) == before
    shown = capsys.readouterr().out
    for word in ("tests.support.models:gpt", "adamw", "finished: step 3 of 3", "none has"):
        assert word in shown
    report = read_run(finished)
    assert report.done == 3 and len(report.segments) > 3
    assert all(row.version == 3 and row.size_bytes > 0 for row in report.segments)
    assert len({row.slot for row in report.segments}) == len(report.segments)
    assert [row["step"] for row in report.rows] == [1, 2, 3]
    held = sum(row.size_bytes for row in report.segments)
    assert held < report.disk_bytes < held + 2**20


def test_neither_torch_nor_the_model_is_imported(finished: Path) -> None:
    """It answers where the model's code is gone, and without torch."""
    script = (
        "import sys; from swaptrain.cli import main; code = main(['inspect', sys.argv[1]]);"
        "assert code == 0; assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", script, str(finished)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_store_of_another_format_says_so_whatever_its_config_has(
    finished: Path, tmp_path: Path
) -> None:
    """A config of another version may have other keys, which alone are refused by their names."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    config, recorded = job(run), run / "config.yaml"
    recorded.write_text(recorded.read_text().replace("\ntrain:\n", "\ntrain:\n  gone: null\n"))
    actions = (lambda: read_run(run), lambda: train(config), lambda: plan(config))
    for action in actions:
        with pytest.raises(ConfigError, match=r"train\.gone: unknown key"):
            action()
    root = read_root(run)
    assert root is not None
    create_root(run, root.model_copy(update={"format": FORMAT - 1}))
    for action in actions:
        with pytest.raises(ConfigError, match=f"has format {FORMAT - 1}"):
            action()


def test_a_run_that_was_killed_inside_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step, and the segments that are committed, are named."""
    config = job(tmp_path / "run")
    segments = len(read_segments(config, monkeypatch))
    killed_after(2 * segments + 2, config, monkeypatch)  # created, step 1, two of step 2
    report = read_run(config.run.dir)
    assert report.done == 1
    assert report.state == (f"inside step 2: segments {segments - 1} to {segments} are committed")
    assert [row.version for row in report.segments] == [1] * (segments - 2) + [2, 2]


def read_segments(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Return the segments of the same job, from a plan of it."""
    from swaptrain.verbs.plan import plan

    return plan(config).segments


@pytest.mark.proof
def test_a_run_whose_update_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clipping, the step is done before its update is: both are said."""
    config = job(tmp_path / "run", optimizer={"clip_norm": 1.0})
    segments = len(read_segments(config, monkeypatch))
    killed_after(segments + 1, config, monkeypatch)  # created, one update of step 1
    report = read_run(config.run.dir)
    assert report.done == 1
    assert report.state.startswith("step 1 is done, its update is pending in")


def test_a_run_in_progress(finished: Path) -> None:
    """The process that holds the lock is named, and is not disturbed."""
    assert read_run(finished).writer is None
    with RunLock(finished):
        assert f"pid {os.getpid()}" in str(read_run(finished).writer)
    assert read_run(finished).writer is None


def test_a_torn_line_of_metrics_is_passed_over(finished: Path, tmp_path: Path) -> None:
    """A trainer may be writing it, or was killed in the middle."""
    run = tmp_path / "copy"
    shutil.copytree(finished, run, symlinks=True)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "loss": 1.2, "lr"')
    assert [row["step"] for row in read_run(run).rows] == [1, 2, 3]
    assert main(["inspect", str(run)]) == 0
    (run / "metrics.jsonl").write_bytes(b"\xff\x00" * 40_000)
    assert read_run(run).rows == ()


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, naming the path."""
    (tmp_path / "other").mkdir()
    assert main(["inspect", str(tmp_path / "other")]) == 2
    assert "other" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "absent")]) == 2


def test_a_damaged_record_is_found(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, naming the file: of a segment's slot, and of the root."""
    run = tmp_path / "copy"
    shutil.copytree(finished, run, symlinks=True)
    record = run / "store" / "segments" / "002" / "zarr.json"
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"version":3', b'"version":4'))
    assert main(["inspect", str(run)]) == 3
    assert "zarr.json" in capsys.readouterr().err
    record.write_bytes(whole)
    root = run / "store" / "zarr.json"
    root.write_bytes(root.read_bytes()[:-20] + b" " * 20)
    assert main(["inspect", str(run)]) == 3


def test_a_run_that_was_never_created(finished: Path, tmp_path: Path) -> None:
    """A directory with a config and no store says how to go on."""
    (tmp_path / "run").mkdir()
    shutil.copy(finished / "config.yaml", tmp_path / "run")
    report = read_run(tmp_path / "run")
    assert report.segments == () and "run the same command" in report.state
