"""Direct I/O: bytes arrive as they left, and every fault reaches the future with its path."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import xxhash

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.disk.direct import PIECE_BYTES, DirectIO
from tests.store.helpers import aligned


def _file(path: Path, nbytes: int) -> Path:
    path.write_bytes(bytes(nbytes))
    return path


def _filled(nbytes: int) -> memoryview:
    buffer = aligned(nbytes)
    buffer[:] = os.urandom(nbytes)
    return buffer


@pytest.mark.parametrize("refusal", ["none", "open", "first I/O"])
def test_round_trip(tmp_path: Path, refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written at an offset is read back, its checksum is right, the rest is untouched.

    The same where the file system refuses O_DIRECT, which is said once.
    """
    size = PIECE_BYTES + 3 * 4096
    path = _file(tmp_path / "0", size + 8192)
    if refusal != "none":
        _refuse(monkeypatch, at_open=refusal == "open")
    messages: list[str] = []
    content, target = _filled(size), aligned(size)
    with DirectIO(on_fallback=messages.append) as io:
        digest = io.write(path, content, offset=4096, flush=True).result()
        io.read(path, target, offset=4096, checksum=digest).result()
        io.flush(path).result()
        assert digest == xxhash.xxh3_64_intdigest(content)
        assert target == content
        assert (io.read_bytes, io.write_bytes) == (size, size)
        assert len(messages) == (refusal != "none")
        assert (io.staging_bytes > 0) == (refusal != "none")
    whole = path.read_bytes()
    assert whole[:4096] == whole[4096 + size :] == bytes(4096)
    assert whole[4096 : 4096 + size] == content


def _refuse(monkeypatch: pytest.MonkeyPatch, *, at_open: bool) -> None:
    """Make the file system one that does not know O_DIRECT."""
    plain = {name: getattr(os, name) for name in ("open", "preadv", "pwritev")}

    def refusing_open(path: Path, flags: int, *arguments: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(plain["open"](path, flags, *arguments))

    def refusing(name: str) -> object:
        def call(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return int(plain[name](descriptor, buffers, offset))

        return call

    if at_open:
        monkeypatch.setattr(os, "open", refusing_open)
    else:
        monkeypatch.setattr(os, "preadv", refusing("preadv"))
        monkeypatch.setattr(os, "pwritev", refusing("pwritev"))


def test_a_flipped_bit_is_caught(tmp_path: Path) -> None:
    """One wrong bit fails the read with the path and both checksums."""
    path = _file(tmp_path / "0", 8192)
    with DirectIO() as io:
        digest = io.write(path, _filled(8192), flush=False).result()
        content = bytearray(path.read_bytes())
        content[5000] ^= 4
        path.write_bytes(content)
        with pytest.raises(DamagedStoreError, match="checksum") as caught:
            io.read(path, aligned(8192), checksum=digest).result()
    assert caught.value.path == path


def test_short_and_missing_files_are_damage(tmp_path: Path) -> None:
    """A file that ends early or is not there is a damaged store, and is never created."""
    path = _file(tmp_path / "0", 5000)
    with DirectIO() as io:
        with pytest.raises(DamagedStoreError, match="too short"):
            io.read(path, aligned(8192)).result()
        with pytest.raises(DamagedStoreError, match="missing"):
            io.read(tmp_path / "1", aligned(4096)).result()
        with pytest.raises(RunError, match="No such file"):
            io.write(tmp_path / "1", aligned(4096), flush=True).result()
    assert not (tmp_path / "1").exists()


def test_large_reads_leave_gaps_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is several requests to the disk, a write one; a file may end between two of them."""
    size = 2 * PIECE_BYTES + 4096
    path, target, content = _file(tmp_path / "0", size), aligned(size), _filled(size)
    asked: list[tuple[str, int]] = []

    def noting(name: str) -> None:
        plain = getattr(os, name)

        def system_call(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            asked.append((name, len(buffers[0])))
            moved: int = plain(descriptor, buffers, offset)
            return moved

        monkeypatch.setattr(os, name, system_call)

    with DirectIO() as io:
        noting("preadv")
        noting("pwritev")
        io.write(path, content, flush=False).result()
        io.read(path, target).result()
        if not io.staging_bytes:  # else pieces both ways
            pieces = [PIECE_BYTES, PIECE_BYTES, 4096]
            assert asked == [("pwritev", size), *(("preadv", piece) for piece in pieces)]
        assert target == content
        _file(path, PIECE_BYTES)
        with pytest.raises(DamagedStoreError, match="too short"):
            io.read(path, target).result()


def test_disk_full_names_what_is_free() -> None:
    """ENOSPC becomes one message with the path, the bytes needed and the bytes free."""
    with DirectIO() as io, pytest.raises(RunError, match=r"/dev/full.*4\.0 KiB were needed.*free"):
        io.write(Path("/dev/full"), aligned(4096), flush=True).result()


def test_unaligned_requests_are_refused_at_once(tmp_path: Path) -> None:
    """The kernel would refuse them just as a file system without O_DIRECT does."""
    path = _file(tmp_path / "0", 8192)
    with DirectIO() as io:
        for buffer, offset in ((aligned(8192)[1:4097], 0), (aligned(100), 0), (aligned(4096), 512)):
            with pytest.raises(ValueError, match="4096"):
                io.read(path, buffer, offset=offset)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    """Many requests leave as many descriptors open as there were before."""
    path = _file(tmp_path / "0", 4096)
    with DirectIO() as io:
        before = len(os.listdir("/proc/self/fd"))
        for future in [io.read(path, aligned(4096)) for _ in range(200)]:
            future.result()
        assert len(os.listdir("/proc/self/fd")) == before
