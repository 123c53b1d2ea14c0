"""The lock of a run: one holder, whatever lies under its name; readers do not disturb it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import swaptrain.store.access.lock as lock_module
from swaptrain.errors import RunError
from swaptrain.store.access.lock import RunLock, lock_owner
from swaptrain.store.read.export_request import ExportDoor, ExportRequest

OTHER = "pid 77\nhost elsewhere\nboot 00000000-1111-2222-3333-444444444444\n"


def link_outside(path: Path) -> None:
    path.with_name("outside").write_text("mine")
    path.symlink_to("outside")


BEFORE: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None,
    "garbage": lambda path: path.write_bytes(b"\xff\x00\x9b[31m pid many\n" * 50),
    "empty": lambda path: path.touch(),
    "directory": lambda path: path.mkdir(),
    "link": link_outside,
    "pipe": lambda path: os.mkfifo(path),
    "released": lambda path: path.write_text("released\n"),
    "same machine": lambda path: path.write_text(lock_module.owner_text()),
}


@pytest.mark.parametrize("new", [True, False], ids=["no other yet", "another one"])
def test_a_deleted_lock_file_lets_nobody_in(new: bool, tmp_path: Path) -> None:
    """Its holder goes on; a second process is refused, and leaves nothing of its own."""
    run_dir = tmp_path / "run"
    with RunLock(run_dir):
        (run_dir / "lock").unlink()
        if not new:
            (run_dir / "lock").touch()
        with pytest.raises(RunError, match="whose lock file somebody has deleted"):
            RunLock(run_dir)
        assert (run_dir / "lock").exists() == (not new)
    RunLock(run_dir).close()


@pytest.mark.parametrize("before", BEFORE)
def test_what_lies_there_is_taken_over(before: str, tmp_path: Path) -> None:
    """Without a word, and a link's target is left alone."""
    BEFORE[before](tmp_path / "lock")
    notes: list[str] = []
    assert lock_owner(tmp_path) is None
    with RunLock(tmp_path, note=notes.append):
        assert stat.S_ISREG((tmp_path / "lock").lstat().st_mode)
        owner = lock_owner(tmp_path)
        assert owner is not None and owner.pid == os.getpid()
        with pytest.raises(RunError, match=rf"in use by another process \(pid {os.getpid()}, "):
            RunLock(tmp_path)
    assert lock_owner(tmp_path) is None
    assert (tmp_path / "lock").read_text().strip() == "released"
    assert notes == []
    if before == "link":
        assert (tmp_path / "outside").read_text() == "mine"


def test_a_new_lock_is_durable_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else of a run a power failure leaves, its directory is told by the lock."""
    flushed: list[Path] = []
    monkeypatch.setattr(lock_module, "flush_directory", flushed.append)
    for _ in range(2):
        with RunLock(tmp_path):
            assert flushed == [tmp_path]


def test_a_lock_that_another_machine_left_is_taken_over_with_a_note(tmp_path: Path) -> None:
    """Once: afterwards it was released."""
    (tmp_path / "lock").write_text(OTHER)
    for expected in (1, 0):
        notes: list[str] = []
        with RunLock(tmp_path, note=notes.append):
            pass
        assert len(notes) == expected
        assert all("pid 77, host elsewhere" in note for note in notes)


def test_a_directory_with_files_is_not_deleted(tmp_path: Path) -> None:
    """The error names it."""
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "file").touch()
    with pytest.raises(RunError, match=r"cannot open .*/lock: Directory not empty"):
        RunLock(tmp_path)


def test_a_full_disk_refuses_no_lock(tmp_path: Path) -> None:
    """The text is written over the one before, in place."""
    with RunLock(tmp_path):
        before = (tmp_path / "lock").stat()
    with RunLock(tmp_path):
        after = (tmp_path / "lock").stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)


def test_a_lock_that_is_withdrawn_is_not_held_by_two(tmp_path: Path) -> None:
    """Who opened the file before it was removed does not take it for the lock."""
    first = RunLock(tmp_path / "run")
    opened = os.open(tmp_path / "run" / "lock", os.O_RDWR)
    first.withdraw()
    assert not (tmp_path / "run").exists()
    first.close()
    with RunLock(tmp_path / "run"):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the file that is gone
        assert not lock_module.is_named(opened, tmp_path / "run" / "lock")
    os.close(opened)


def test_a_lock_stays_where_something_was_written(tmp_path: Path) -> None:
    """A creation that is refused in its middle leaves a run's directory, which goes on or anew."""
    for name in ("config.yaml", "slots"):
        run = tmp_path / name
        lock = RunLock(run)
        (run / name).mkdir()
        lock.withdraw()
        lock.close()
        assert (run / "lock").exists()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker of a data set may outlive the trainer."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from swaptrain.store.access.lock import RunLock\n"
        f"lock = RunLock(Path({str(tmp_path)!r}))\n"
        "if os.fork() == 0:\n"
        "    print('forked', flush=True); sys.stdin.read(); os._exit(0)\n"
        "os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "forked\n"
        assert process.wait() == 0
        RunLock(tmp_path).close()


def test_readers_do_not_keep_a_trainer_from_the_lock(tmp_path: Path) -> None:
    """Asking who has it all the time, which takes it for a moment, refuses nobody."""
    RunLock(tmp_path).close()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            lock_owner(tmp_path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            RunLock(tmp_path).close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_where_there_are_no_locks_the_text_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note says so; a process of this machine that lives is still found by its pid."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    notes: list[str] = []
    with RunLock(tmp_path, note=notes.append):
        assert len(notes) == 1 and "has no locks" in notes[0]
    parent = lock_module.owner_text().replace(f"pid {os.getpid()}", f"pid {os.getppid()}")
    (tmp_path / "lock").write_text(parent)
    assert lock_owner(tmp_path) is not None
    with pytest.raises(RunError, match=f"pid {os.getppid()}"):
        RunLock(tmp_path)


def test_an_exporter_that_died_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Its request is removed, whatever is in it; one that lives is waited for, and may be left."""
    door = ExportDoor(tmp_path, lambda _: None)
    assert not door.is_wanted()
    (tmp_path / "export.request").write_text(OTHER + "ready 3\n")
    assert door.is_wanted()
    door.let_in(4, lambda: None)
    assert not door.is_wanted()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 3:
            raise KeyboardInterrupt

    with ExportRequest(tmp_path, lambda _: None) as request:
        with pytest.raises(KeyboardInterrupt):
            door.let_in(4, tick)
        assert b"ready 4" in (tmp_path / "export.request").read_bytes()
        with RunLock(tmp_path):
            assert request.wait() is not None
        assert request.wait() is None
    assert not door.is_wanted()
