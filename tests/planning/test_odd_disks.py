"""A run on a disk that keeps what is deleted while it is open, or does not say what is free."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.store.disk import durable_files as files
from swaptrain.verbs.plan import print_plan
from tests.support.runs import config_of, losses, trained

pytestmark = pytest.mark.trains


def job(run_dir: Path, **sections: Any) -> Config:
    tree = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
        "data": {"python": "tests.support.datasets:tokens"},
        "train": {"steps": 2},
    }
    return config_of(run_dir, tree | sections)


def open_below(path: Path) -> list[str]:
    """Return what this process has open below a directory."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return [target for target in targets if target.startswith(f"{path.resolve()}/")]


def test_nothing_is_open_in_what_the_end_of_a_run_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On FUSE and NFS an open file stays in its directory under another name."""
    rmtree = shutil.rmtree

    def as_on_fuse(path: Path, **options: Any) -> None:
        if open_below(Path(path)):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", as_on_fuse)
    run_dir = trained(job(tmp_path / "run"))
    assert not (run_dir / "spill").exists()


@pytest.mark.parametrize(("folder", "error"), [("spill", errno.ENOTEMPTY), ("slots", errno.EBUSY)])
def test_what_cannot_be_deleted_at_the_end_is_no_failure(
    folder: str,
    error: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One note names it, the run is finished, and the same command deletes it later."""
    rmtree = shutil.rmtree

    def refuses(path: Path, **options: Any) -> None:
        if folder in Path(path).parts:
            raise OSError(error, os.strerror(error), str(path))
        rmtree(path, **options)

    config = job(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuses)
        trained(config)
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"{tmp_path / 'run' / folder}" in said
    assert f"could not be deleted ({os.strerror(error)})" in said
    assert "finished: step 2 of 2" in said
    found = losses(tmp_path / "run")
    trained(config)
    assert not (tmp_path / "run" / "spill").exists()
    assert len(list((tmp_path / "run" / "slots").iterdir())) == 1
    assert losses(tmp_path / "run") == found
    assert "could not be deleted" not in capsys.readouterr().out


@pytest.mark.proof
def test_a_run_goes_on_where_the_room_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` and the start say so; neither takes it for a full disk."""
    statvfs = os.statvfs

    def without(path: Any) -> os.statvfs_result:
        fields = list(statvfs(path))
        fields[2:8] = [0] * 6
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", without)
    config = job(tmp_path / "run")
    print_plan(config)
    assert "room not known" in " ".join(capsys.readouterr().out.split())
    trained(config)
    said = capsys.readouterr().out
    assert "does not say how much is free" in said
    assert len(losses(tmp_path / "run")) == 2


def test_a_run_flushes_file_by_file_where_it_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits, and without a call for the whole file system."""
    expected = losses(trained(job(tmp_path / "plain")))

    def refuses(_: int) -> None:
        raise AssertionError("syncfs was called")

    monkeypatch.setattr(files, "syncfs", refuses)
    monkeypatch.setattr(files, "syncfs_reaches_disk", lambda _: False)
    assert losses(trained(job(tmp_path / "run"))) == expected
