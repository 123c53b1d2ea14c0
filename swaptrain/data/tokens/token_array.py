"""Token ids in a zarr v3 array: written once as a stream, read a few at a time without zarr."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from swaptrain.errors import RunError
from swaptrain.store.disk.durable_files import disk_errors, flush_directory, read_whole, run_error
from swaptrain.store.paths import ZARR_JSON

__all__ = [
    "CHUNK_TOKENS",
    "TokenArray",
    "expect_at",
    "read_at",
    "token_dtype",
    "write_token_array",
]

CHUNK_TOKENS = 2**20

Array = np.ndarray[Any, Any]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the narrower of uint16 and uint32 that holds every id below `vocabulary`."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def write_token_array(path: Path, pieces: Iterable[Array], vocabulary: int) -> int:
    """Write the concatenated pieces as an uncompressed 1-D array; return the number of tokens.

    Memory: one chunk (2**20 tokens) and one piece. Everything is flushed when it returns; the
    caller's marker makes it count. Raises RunError when the disk refuses.
    """
    dtype = token_dtype(vocabulary)
    with disk_errors(path, "write the tokens to", CHUNK_TOKENS * dtype.itemsize):
        array = zarr.create_array(
            store=path,
            shape=(0,),
            chunks=(CHUNK_TOKENS,),
            dtype=dtype,
            compressors=None,
            fill_value=0,
            attributes={"vocabulary": vocabulary},
            config={"write_empty_chunks": True},  # the reader opens every chunk's file
        )
        chunk, filled, written = np.empty(CHUNK_TOKENS, dtype), 0, 0
        for piece in pieces:
            rest = piece
            while len(rest):
                taken = rest[: CHUNK_TOKENS - filled]
                chunk[filled : filled + len(taken)] = taken
                filled += len(taken)
                rest = rest[len(taken) :]
                if filled == CHUNK_TOKENS:
                    _append(array, path, written, chunk)
                    written, filled = written + filled, 0
        if filled:
            _append(array, path, written, chunk[:filled])
        for directory in (path / "c", path, path.parent):
            if directory.is_dir():
                flush_directory(directory)
        _flush(path / ZARR_JSON)
    return written + filled


def _append(array: zarr.Array[Any], path: Path, written: int, chunk: Array) -> None:
    array.resize((written + len(chunk),))
    array[written : written + len(chunk)] = chunk
    # Chunk by chunk, so that dirty pages never pile up in memory.
    _flush(path / "c" / str(written // CHUNK_TOKENS))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


class TokenArray:
    """Reads any few tokens of an array that `write_token_array` made, and holds none of it."""

    def __init__(self, path: Path, length: int, vocabulary: int) -> None:
        self._path, self._length, self._dtype = path, length, token_dtype(vocabulary)
        self._vocabulary = vocabulary

    def is_whole(self) -> bool:
        """Tell whether the metadata and every chunk file are there in full length."""
        chunk_bytes = CHUNK_TOKENS * self._dtype.itemsize
        chunks = -(-self._length // CHUNK_TOKENS)
        try:
            os.stat(self._path / ZARR_JSON)
            return all(
                os.stat(self._path / "c" / str(number)).st_size == chunk_bytes
                for number in range(chunks)
            )
        except FileNotFoundError:
            return False

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._length

    def expect(self, start: int, stop: int) -> None:
        """Begin to read tokens [start, stop), which `read` will be asked for."""
        for path, offset, count in self._pieces(start, stop):
            expect_at(path, offset * self._dtype.itemsize, count, self._dtype)

    def read(self, start: int, stop: int) -> Array:
        """Return tokens [start, stop) as int64 [stop - start]; raises RunError."""
        parts = [
            read_at(path, offset * self._dtype.itemsize, count, self._dtype)
            for path, offset, count in self._pieces(start, stop)
        ]
        tokens = np.concatenate(parts).astype(np.int64)
        if tokens.max() >= self._vocabulary:
            raise RunError(
                f"the tokens in {self._path} are damaged, the id {tokens.max()} is not one of "
                f"{self._vocabulary}: delete that directory, and they are made again"
            )
        return tokens

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
        """Yield, for each chunk that holds some of them, its file, the first token and how many."""
        while start < stop:
            number, offset = divmod(start, CHUNK_TOKENS)
            count = min(stop - start, CHUNK_TOKENS - offset)
            yield self._path / "c" / str(number), offset, count
            start += count


def expect_at(path: Path, offset_bytes: int, count: int, dtype: np.dtype[Any]) -> None:
    """Have the kernel begin to read `count` numbers of a file, and wait for nothing.

    Where it cannot, `read_at` says why.
    """
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, offset_bytes, count * dtype.itemsize, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)


def read_at(path: Path, offset_bytes: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Read `count` numbers of a file and leave nothing of it in the page cache; raises RunError."""
    count_bytes = count * dtype.itemsize
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Without this the kernel reads ahead, 128 KiB for each sequence of 1 KiB.
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
            content = read_whole(handle, count_bytes, offset_bytes)
            os.posix_fadvise(handle, offset_bytes, count_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    except OSError as error:
        raise run_error(error, path, "read the tokens in") from error
    if len(content) != count_bytes:
        raise RunError(
            f"{path} ends before byte {offset_bytes + count_bytes}: it was cut while the run used"
            " it; restore it, or start again so that the tokens are built anew"
        )
    return np.frombuffer(content, dtype=dtype)
