"""The root, the lock and the static groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr

from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.store.access.lock import RunLock
from swaptrain.store.disk.durable_files import run_error, write_aside
from swaptrain.store.format.root import (
    create_root,
    ensure_group,
    free_bytes,
    read_buffers,
    read_root,
    refuse_tmpfs,
    write_buffers,
)
from swaptrain.store.paths import RunPaths
from tests.store.helpers import small_root


def test_the_root_comes_back(tmp_path: Path) -> None:
    """What is recorded at creation is read as it was; before that there is no store."""
    assert read_root(tmp_path) is None
    record = small_root(2, commit_every=3, unit="step", step=6)
    create_root(tmp_path, record)
    assert read_root(tmp_path) == record
    assert (
        zarr.open_group(tmp_path / "store", mode="r").attrs["swaptrain"]["choices"]["threads"] == 1
    )


def test_a_bad_root_is_refused(tmp_path: Path) -> None:
    """Damage is exit 3; a store of another format is exit 2 and says what to do."""
    create_root(tmp_path, small_root(format=99))
    with pytest.raises(ConfigError, match="format 99"):
        read_root(tmp_path)
    path = tmp_path / "store" / "zarr.json"
    path.write_bytes(path.read_bytes().replace(b"test", b"tesu"))
    with pytest.raises(DamagedStoreError, match="does not verify"):
        read_root(tmp_path)


def test_buffers_keep_dtype_shape_and_bits(tmp_path: Path) -> None:
    """Unmutated buffers, of no dimensions and of bf16 too, appear in the hierarchy."""
    ensure_group(RunPaths(tmp_path).segments())
    buffers = {
        "rope.inv_freq": np.random.default_rng(0).random((3, 4), dtype=np.float32).T,
        "count": np.array(7, dtype=np.int64),
        "scale": np.ones(3, dtype=ml_dtypes.bfloat16),
        "mask": np.array([True, False]),
        "empty": np.zeros((0, 2), dtype=np.float16),
    }
    write_buffers(tmp_path, buffers)
    write_buffers(tmp_path, buffers)
    create_root(tmp_path, small_root())
    back = read_buffers(tmp_path)
    assert back.keys() == buffers.keys()
    for name, value in buffers.items():
        assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(back[name], value)
    assert set(zarr.open_group(tmp_path / "store" / "buffers", mode="r")) == buffers.keys()
    assert read_buffers(tmp_path, name="others") == {}


def test_one_writer(tmp_path: Path) -> None:
    """A second process is refused with the pid and host of the first, until that one is gone."""
    code = (
        "import sys; from pathlib import Path; from swaptrain.store.access.lock import RunLock\n"
        f"lock = RunLock(Path({str(tmp_path)!r}))\nprint('locked', flush=True)\nsys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match=f"pid {owner.pid}, host {os.uname().nodename}"):
            RunLock(tmp_path)
    finally:
        owner.kill()
        owner.communicate()
    with RunLock(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"pid {os.getpid()}\n")
        with pytest.raises(RunError):
            RunLock(tmp_path)
    RunLock(tmp_path).close()


def test_memory_file_systems_are_refused(tmp_path: Path) -> None:
    """tmpfs is RAM, also for a directory that does not exist yet; a disk is fine."""
    refuse_tmpfs(tmp_path / "new" / "run")
    if os.path.ismount("/dev/shm"):
        with pytest.raises(ConfigError, match=r"tmpfs.*run\.dir"):
            refuse_tmpfs(Path("/dev/shm/new/run"))
    assert free_bytes(tmp_path / "new") > 0


def test_write_aside_replaces_whole_files(tmp_path: Path) -> None:
    """The file is the new one, nothing else is left, and errors name the path."""
    for content in (b"one", b"three"):
        write_aside(tmp_path / "f", content)
        assert (tmp_path / "f").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert "/x: Input/output error" in str(run_error(OSError(5, ""), Path("/x"), "read"))
