"""What a file system does not do for us is done file by file, bottom up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swaptrain.errors import ConfigError, RunError
from swaptrain.store.disk import durable_files as files
from swaptrain.store.disk import flush
from swaptrain.store.disk.durable_files import flush_file_system, flush_file_systems, free_bytes
from swaptrain.store.disk.flush import file_system_type, flush_tree, syncfs_reaches_disk
from swaptrain.store.format.root import refuse_tmpfs

FUSE, NFS, TMPFS, EXT4 = 0x65735546, 0x6969, 0x01021994, 0xEF53


def tree(path: Path) -> list[Path]:
    """Make two arrays with chunk files, a link and a pipe; return the plain files."""
    made = [path / "a" / "zarr.json", path / "a" / "c" / "0", path / "a" / "c" / "1", path / "b"]
    for file in made:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    (path / "link").symlink_to("nowhere")
    (path / "to-files").symlink_to("a")
    os.mkfifo(path / "pipe")
    return made


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list that every fsync adds its file to."""
    found: list[Path] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def of_type(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    monkeypatch.setattr(flush, "file_system_type", lambda _: number)


@pytest.mark.parametrize("number", [FUSE, NFS, TMPFS, 0x794C7630, None])
def test_an_unknown_file_system_is_flushed_file_by_file(
    number: int | None, tmp_path: Path, flushed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file before its directory, each directory before the one above it, up to the disk's."""
    of_type(monkeypatch, number)
    root = tmp_path / "store"
    root.mkdir()
    made = tree(root)
    flush_file_system(root)
    position = {path: index for index, path in enumerate(flushed)}
    below = [*made, root / "a" / "c", root / "a", root]
    assert set(below) <= set(position)
    for path in (*below, tmp_path):
        assert position[path] < position[path.parent]
    assert not {root / "pipe", root / "link", root / "to-files"} & set(position)


@pytest.mark.parametrize(
    "number", [EXT4, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E]
)
def test_a_known_one_by_a_single_call(
    number: int, tmp_path: Path, flushed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_type(monkeypatch, number)
    calls: list[int] = []
    monkeypatch.setattr(files, "syncfs", calls.append)
    tree(tmp_path)
    flush_file_system(tmp_path)
    assert (len(calls), flushed) == (1, [])
    flush_file_systems([tmp_path, tmp_path / "a", tmp_path / "a" / "c"])
    assert len(calls) == 2


def test_several_trees_are_each_flushed_once(
    tmp_path: Path, flushed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in one that was flushed already is not flushed again; a link's target is."""
    of_type(monkeypatch, FUSE)
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run / "slots" / "1", other / "slot"):
        folder.mkdir(parents=True)
        (folder / "chunk").write_bytes(b"x")
    (run / "slots" / "2").symlink_to(other / "slot")
    flush_file_systems([run, run / "slots" / "1", run / "slots" / "2"])
    assert flushed.count(run / "slots" / "1" / "chunk") == 1
    assert flushed.count(other / "slot" / "chunk") == 1


def test_what_cannot_be_flushed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_type(monkeypatch, FUSE)
    tree(tmp_path)

    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match="cannot flush"):
        flush_file_system(tmp_path)


def test_a_file_that_vanishes_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tree(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: made[1].unlink(missing_ok=True))
    flush_tree(tmp_path)


def test_the_kernel_is_asked_for_the_file_system() -> None:
    """Of /proc, which every machine has; tmpfs is refused by the same question."""
    assert file_system_type(Path("/proc")) == 0x9FA0
    assert not syncfs_reaches_disk(Path("/proc"))
    assert file_system_type(Path("/no/such/path")) is None
    if file_system_type(Path("/dev/shm")) == TMPFS:
        with pytest.raises(ConfigError, match="RAM"):
            refuse_tmpfs(Path("/dev/shm"))


def test_a_file_system_without_blocks_has_no_known_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full one has 0 bytes, one that counts no blocks does not say."""
    real = os.statvfs(tmp_path)

    def counted(blocks: int, available: int) -> None:
        fields = list(real)
        fields[2], fields[4] = blocks, available
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    counted(1000, 0)
    assert free_bytes(tmp_path) == 0
    counted(0, 0)
    assert free_bytes(tmp_path) is None
    error = files.run_error(OSError(28, "No space left on device"), tmp_path, "write")
    assert "not known" in str(error)
    assert "0 B are free" not in str(error)
