"""A real file system of 24 MiB that fills up, turns read-only or goes away under a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, RunError
from swaptrain.observe import metrics
from swaptrain.observe.progress import Progress
from swaptrain.store.disk.durable_files import free_bytes
from tests.support.killing import final_state, metrics_key
from tests.support.runs import config_of, trained

pytestmark = pytest.mark.trains

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: from now on every operation is an I/O error
_WITHOUT_LOG = 2
JOB: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens", "micro_batches": 2},
    "memory": {"host": "96MiB", "segment": "64KiB"},
    "train": {"steps": 8},
}


class Disk:
    """An ext4 in a file, mounted."""

    def __init__(self, folder: Path) -> None:
        self.image, self.path = folder / "image", folder / "disk"
        self.path.mkdir()
        with self.image.open("wb") as file:
            file.truncate(24 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(self.image)], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(
            ["mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.path)],
            check=True,
            capture_output=True,
        )

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True, capture_output=True)

    def repair(self) -> None:
        """Mount it anew, checked, as an administrator would."""
        self.unmount()
        subprocess.run(["e2fsck", "-fy", str(self.image)], capture_output=True)
        self.mount()

    def fill(self) -> None:
        """Take every block that is free, those reserved for the superuser too."""
        for number in range(3):  # what is freed meanwhile, or found too late, is taken as well
            with (self.path / f"filler{number}").open("wb", buffering=0) as file:
                piece = 1 << 20
                while piece:
                    try:
                        file.write(bytes(piece))
                    except OSError:
                        piece //= 2
            os.sync()

    def drain(self) -> None:
        for file in self.path.glob("filler*"):
            file.unlink()

    def fail(self) -> None:
        """Let the file system find an error, after which it is read-only."""
        (trigger := self._sysfs() / "trigger_fs_error").write_text("test")
        assert trigger.exists()

    def vanish(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(descriptor)

    def _sysfs(self) -> Path:
        device = os.stat(self.path).st_dev
        link = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        return Path("/sys/fs/ext4") / link.resolve().name


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Return a small disk, or skip where this test may not mount one."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if not all(shutil.which(tool) for tool in ("mkfs.ext4", "mount", "umount", "e2fsck")):
        pytest.skip("the tools of ext4 are not installed")
    try:
        disk = Disk(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr.decode().strip()}")
    yield disk
    disk.unmount()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return what the job ends with on a disk that does nothing."""
    run_dir = trained(config_of(tmp_path_factory.mktemp("expected") / "run", JOB))
    return final_state(run_dir), metrics_key(run_dir)


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Do something once, when a step has been reported."""
    original = Progress.step_done

    def step_done(self: Progress, row: Any) -> None:
        original(self, row)
        if row.step == step:
            action()

    monkeypatch.setattr(Progress, "step_done", step_done)


def ends_as(run_dir: Path, expected: tuple[Any, Any]) -> bool:
    return (final_state(run_dir), metrics_key(run_dir)) == expected


def config_on(disk: Disk, tmp_path: Path) -> Config:
    config = config_of(tmp_path / "run", JOB)
    run = config.run.model_copy(update={"dir": disk.path / "run"})
    return config.model_copy(update={"run": run})


def test_a_run_that_does_not_fit_is_refused_and_leaves_nothing(disk: Disk, tmp_path: Path) -> None:
    (disk.path / "filler").write_bytes(bytes(free_bytes(disk.path) - (400 << 10)))
    with pytest.raises(ConfigError, match=r"needs .* KiB of disk there, .* KiB are free: make"):
        trained(config_on(disk, tmp_path))
    assert not (disk.path / "run").exists()


@pytest.mark.proof
def test_a_disk_that_something_else_fills_does_not_stop_a_run(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: tuple[Any, Any]
) -> None:
    """Every byte that the run still writes was reserved at its start."""
    after_step(monkeypatch, 1, disk.fill)
    run_dir = trained(config_on(disk, tmp_path))
    assert ends_as(run_dir, expected)


@pytest.mark.proof
def test_a_full_disk_without_reserved_lines_stops_a_run_that_goes_on_later(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: tuple[Any, Any]
) -> None:
    """As on a file system without fallocate: the lines of metrics.jsonl find no room."""
    with monkeypatch.context() as patched:
        patched.setattr(metrics, "reserve_beyond", lambda *_: None)
        after_step(patched, 1, disk.fill)
        with pytest.raises(RunError, match=r"metrics.jsonl.*were needed, 0 B are free.*make room"):
            trained(config_on(disk, tmp_path))
    disk.drain()
    assert ends_as(trained(config_on(disk, tmp_path)), expected)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("happens", "said"),
    # A flush that is under way when the log is given up fails with EIO, a later one with EROFS.
    [
        (Disk.fail, "(Read-only file system|Input/output error)"),
        (Disk.vanish, "Input/output error"),
    ],
    ids=["read-only", "gone"],
)
def test_a_disk_that_fails_stops_a_run_that_goes_on_when_it_is_back(
    happens: Callable[[Disk], None],
    said: str,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: tuple[Any, Any],
) -> None:
    with monkeypatch.context() as patched:
        after_step(patched, 3, lambda: happens(disk))
        with pytest.raises(RunError, match=f"{disk.path}/run.*{said}.*run the same command again"):
            trained(config_on(disk, tmp_path))
    with pytest.raises(RunError, match=said):
        trained(config_on(disk, tmp_path))
    disk.repair()
    assert ends_as(trained(config_on(disk, tmp_path)), expected)
