"""Runs, stores and configs of somebody else: nothing leaves the run directory, nothing executes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from swaptrain.cli import main
from swaptrain.store.slots import run_token
from tests.support.stores import Job, small_run


@pytest.fixture(scope="module", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a run that stopped inside a step."""
    return small_run(tmp_path_factory.mktemp("job"), "inside a step")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a directory of the user's, with a file, that no run may touch."""
    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True)
    (folder / "id").write_text("secret " * 1000)
    return folder


def commands(job: Job) -> list[list[str]]:
    """Return every command that opens the run, also the one that deletes it."""
    run = str(job.config.run.dir)
    train = ["--config", str(job.config.run.dir.with_suffix(".yaml"))]
    return [
        ["inspect", run],
        ["export", run, "--to", f"{run}/weights.safetensors"],
        ["plan", *train],
        train,
        [*train, "--fresh"],
    ]


def refused(job: Job, capsys: pytest.CaptureFixture[str], *, codes: tuple[int, ...] = (3,)) -> str:
    """Run every command on the run as it is; each is refused with a message. Return the last."""
    message = ""
    for command in commands(job):
        code = main(command)
        message = capsys.readouterr().err
        assert code in codes, (command, message)
        assert "Traceback" not in message and "this is a bug" not in message
        assert "swaptrain: error: " in message
    return message


def _to_file(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(outside / "id")


def _to_folder(path: Path, outside: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rename(outside.parent / path.name)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(outside)


LINKS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "lock": ("lock", _to_file),
    "config": ("config.yaml", _to_file),
    "config aside": ("config.yaml.tmp", _to_file),
    "metrics": ("metrics.jsonl", _to_file),
    "speed": ("speed.tmp", _to_file),
    "export aside": ("weights.safetensors.partial", _to_file),
    "live name": ("store/segments/001", _to_folder),
    "live name aside": ("store/segments/001.next", _to_folder),
    "segments": ("store/segments", _to_folder),
    "store": ("store", _to_folder),
    "slots": ("slots", _to_folder),
    "slot": ("slots/634a9613-900", _to_folder),
    "root": ("store/zarr.json", _to_file),
    "frozen": ("static/frozen/002", _to_folder),
    "static": ("static", _to_folder),
    "spill": ("spill", _to_folder),
    "values": ("spill/values", _to_folder),
    "data": ("data", _to_folder),
    "data record": ("data/train.json", _to_file),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_that_lead_out_are_refused(
    name: str, job: Job, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No verb reads, overwrites or deletes through a link, not even with --fresh."""
    run = job.copy()
    place, make = LINKS[name]
    make(run / place, outside)
    before = {path: path.read_bytes() for path in outside.parent.rglob("*") if path.is_file()}
    assert place in refused(job, capsys)
    assert before == {
        path: path.read_bytes() for path in outside.parent.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("inside", ["zarr.json", "weights/zarr.json", "weights/c/0", "weights/c"])
def test_links_in_a_slot_are_refused(
    inside: str, job: Job, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chunk that is a link would be overwritten by the next commit."""
    run = job.copy()
    slot = next(path for path in sorted((run / "slots").iterdir()))
    path = slot / inside
    (_to_folder if path.is_dir() else _to_file)(path, outside)
    refused(job, capsys)
    assert (outside / "id").read_text() == "secret " * 1000


def test_pipes_are_not_waited_for(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe or a socket in the place of a chunk or of the root would never end."""
    for place in ("store/zarr.json", "metrics.jsonl", "lock", "spill/kept/pipe"):
        run = job.copy()
        (run / place).parent.mkdir(exist_ok=True)
        (run / place).unlink(missing_ok=True)
        os.mkfifo(run / place)
        refused(job, capsys)
    run = job.copy()
    here = Path.cwd()
    os.chdir(run)  # the name of a socket is at most 107 bytes long
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("talk")
        os.chdir(here)
        refused(job, capsys)


def test_a_slot_of_another_run_is_refused(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link into another run's folder is neither followed nor deleted with --fresh."""
    run = job.copy()
    slot = sorted((run / "slots").iterdir())[0]
    victim = tmp_path / "disk" / "swaptrain-slots" / "precious-00000000" / slot.name
    victim.parent.mkdir(parents=True)
    slot.rename(victim)
    slot.symlink_to(victim)
    before = {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}
    train = commands(job)[-2]
    assert main(train) == 2
    message = capsys.readouterr().err
    assert "not a folder of this run" in message and run_token(run) in message
    # A folder that the user has renamed is the run's, and is found again.
    moved = victim.parent.with_name(run_token(run))
    victim.parent.rename(moved)
    assert main([*train, f"store.paths=[{tmp_path / 'disk'}]"]) == 0
    assert Path(os.readlink(slot)) == moved / slot.name
    moved.rename(victim.parent)
    slot.unlink()
    slot.symlink_to(victim)
    now = {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}
    assert now != before
    assert main([*train, "--fresh"]) == 0
    assert now == {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}
