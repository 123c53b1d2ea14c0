"""Runs and stores of somebody else, and one's own: nothing leaves the run directory."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swaptrain.cli import main
from swaptrain.store.slots.slot_disks import run_token
from swaptrain.verbs.train import train
from tests.support.runs import config_of, rows
from tests.support.stores import MLP, Job, small_run

pytestmark = pytest.mark.trains


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
    for place in ("store/zarr.json", "metrics.jsonl", "lock", "spill/finished/pipe"):
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
    assert "finished" in capsys.readouterr().out
    assert Path(os.readlink(slot)) == moved / slot.name
    moved.rename(victim.parent)
    slot.unlink()
    slot.symlink_to(victim)
    now = {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}
    assert now != before
    assert main([*train, "--fresh"]) == 0
    assert now == {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}


@pytest.mark.proof
def test_files_get_the_users_umask(tmp_path: Path) -> None:
    """Nothing is readable by others, nor kept from the group, against the user's umask."""
    for mask, file_mode, directory_mode in ((0o027, 0o640, 0o750), (0o002, 0o664, 0o775)):
        config = config_of(tmp_path / f"{mask:o}" / "run", MLP)
        before = os.umask(mask)
        try:
            train(config)
        finally:
            os.umask(before)
        for path in config.run.dir.rglob("*"):
            if not path.is_symlink():
                wanted = directory_mode if path.is_dir() else file_mode
                assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.proof
def test_files_are_made_in_the_run_only(tmp_path: Path) -> None:
    """But for what is measured of the machine, in the user's cache; nothing in /tmp."""
    job = tmp_path / "here"
    config = config_of(job / "run", MLP)
    (job / "tmp").mkdir()
    script = (
        "import os, sys\n"
        "made, run = set(), sys.argv[1]\n"
        "def watch(event, args):\n"
        "    if event == 'open' and isinstance(args[0], str) and (args[2] or 0) & os.O_CREAT:\n"
        "        made.add(os.path.abspath(args[0]))\n"
        "    if event in ('os.mkdir', 'os.rename', 'os.symlink'):\n"
        "        made.add(os.path.abspath(args[1 if event != 'os.mkdir' else 0]))\n"
        "sys.addaudithook(watch)\n"
        "from swaptrain.cli import main\n"
        "code = main(['--config', run])\n"
        "print('\\n'.join(f'made {path}' for path in sorted(made)))\n"
        "sys.exit(code)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(job / "cache"), "TMPDIR": str(job / "tmp")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch has set it in this process
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(job / "run.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    made = [Path(line.removeprefix("made ")) for line in lines if line.startswith("made ")]
    assert any(path.name == "metrics.jsonl" for path in made)
    allowed = (config.run.dir, job / "cache" / "swaptrain", Path("/dev/null"), Path("/proc/self"))
    astray = {path for path in made if not any(path.is_relative_to(place) for place in allowed)}
    # Python itself tries once whether it could write there, and leaves nothing.
    tried = {path for path in astray if path.parent == job / "tmp"}
    assert not any((job / "tmp").iterdir())
    assert astray - tried <= {job / "cache"}, astray


@pytest.mark.proof
def test_a_finished_run_on_other_disks_can_be_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folders there are renamed as the message says; then it goes on from where it was."""
    disks = [str(tmp_path / "x"), str(tmp_path / "y")]
    config = config_of(tmp_path / "old" / "run", {**MLP, "store": {"paths": disks}})
    train(config)
    moved = tmp_path / "new"
    (tmp_path / "old" / "run").rename(moved)
    command = ["--config", str(tmp_path / "old" / "run.yaml"), f"run.dir={moved}", "train.steps=3"]
    assert main(command) == 2
    assert run_token(moved) in capsys.readouterr().err
    for pool in tmp_path.glob("[xy]/swaptrain-slots/*/"):
        pool.rename(pool.with_name(run_token(moved)))
    assert main(command) == 0
    assert [row["step"] for row in rows(moved)] == [1, 2, 3]
    assert main(["verify", str(moved)]) == 0
