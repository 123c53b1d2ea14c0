"""A zarr array whose chunk files are read and written directly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import xxhash
import zarr
from zarr.codecs import BytesCodec
from zarr.core.buffer import Buffer

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import allocate, disk_errors, flush_file_system, run_error
from swaptrain.store.format.array_metadata import array_shape
from swaptrain.store.format.bfloat16 import register
from swaptrain.store.format.layout import ArrayLayout
from swaptrain.store.paths import ZARR_JSON
from swaptrain.strict_json import read_json

__all__ = ["ArrayFiles", "Place"]

Place = tuple[Path, int, int | None]
"""What a read or a write covers: an array, the first of its chunks or of a part's, and the row."""

_MOST_METADATA_BYTES = 2**16
_PIECE_BYTES = 4 * 2**20


class ArrayFiles:
    """An uncompressed zarr v3 array of equal chunks, one preallocated file each.

    1-D of `chunks` chunks; with `rows`, 2-D, and a row (a micro-batch) has `chunks` chunks. It may
    stand for a part of an array, which begins with its chunk `first`.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        chunk_bytes: int,
        chunks: int,
        rows: int | None = None,
        first: int = 0,
    ) -> None:
        self.path, self.dtype = path, dtype
        self.chunk_bytes, self.chunks, self.rows = chunk_bytes, chunks, rows
        self.first = first

    @classmethod
    def of_layout(cls, path: Path, layout: ArrayLayout, rows: int | None = None) -> ArrayFiles:
        """Return the files of a layout; `path` is the array's own directory."""
        return cls(path, layout.dtype, layout.chunk_bytes, layout.chunks, rows)

    @classmethod
    def open(cls, path: Path) -> ArrayFiles:
        """Return the files of an array that exists, as its zarr.json describes them.

        Raises DamagedStoreError when it is missing or is not an array that swaptrain writes,
        RunError when the disk fails.
        """
        file = path / ZARR_JSON
        try:
            metadata = read_json(file, _MOST_METADATA_BYTES)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise run_error(error, file, "read") from error
            raise DamagedStoreError(
                "an array's metadata is missing", array=path.name, path=file
            ) from error
        except ValueError as error:
            raise DamagedStoreError(
                f"an array's metadata cannot be read: {error}", array=path.name, path=file
            ) from error
        found = array_shape(metadata, file)
        return cls(path, found.dtype, found.chunk_bytes, found.chunks, found.rows)

    def part(self, first: int, chunks: int) -> ArrayFiles:
        """Return some chunks of an array without rows, to be read and written by themselves."""
        if self.rows is not None or first + chunks > self.chunks:
            raise ValueError(f"array {self.name} has no chunks {first} to {first + chunks - 1}")
        return ArrayFiles(self.path, self.dtype, self.chunk_bytes, chunks, None, first)

    @property
    def name(self) -> str:
        """The array's own name, without that of its group."""
        return self.path.name

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (of the whole array if it has no rows), padding included."""
        return self.chunk_bytes * self.chunks

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, padding included."""
        return self.row_bytes * (self.rows or 1)

    def place(self, row: int | None) -> Place:
        """Return what tells the array, the part of it, or the row from others."""
        return self.path, self.first, row

    def files(self, row: int | None = None) -> list[Path]:
        """Return the chunk files, of one row if the array has rows, in order."""
        if (row is None) != (self.rows is None):
            raise ValueError(
                f"array {self.name} is addressed {'with' if self.rows else 'without'} a row"
            )
        folder = self.path / "c" if row is None else self.path / "c" / str(row)
        return [folder / str(chunk) for chunk in range(self.first, self.first + self.chunks)]

    def create(self, *, flush: bool = True) -> None:
        """Write the metadata and reserve the chunk files, durably if `flush`; what exists is kept.

        Without `flush`, `flush_file_system` is the caller's, once for many arrays. Raises RunError
        (disk full).
        """
        metadata = self.metadata()
        with disk_errors(self.path, "create", self.nbytes):
            for row in range(self.rows) if self.rows is not None else (None,):
                files = self.files(row)
                files[0].parent.mkdir(parents=True, exist_ok=True)
                for file in files:
                    allocate(file, self.chunk_bytes)
            file = self.path / ZARR_JSON
            if not file.exists() or file.read_bytes() != metadata:
                # Not aside: a torn one is not what is expected, and is written again.
                file.write_bytes(metadata)
        if flush:
            flush_file_system(self.path)

    def read(
        self,
        io: DirectIO,
        buffer: memoryview,
        *,
        row: int | None = None,
        checksums: Sequence[int] | None = None,
        segment: int | None = None,
    ) -> list[Future[None]]:
        """Read the array, or one row, into a buffer of exactly its bytes: a future per chunk.

        Errors name `segment`, the array and the chunk.
        """
        expected = checksums if checksums is not None else [None] * self.chunks
        parts = zip(self.files(row), self._parts(buffer), expected, strict=True)
        return [
            io.read(file, part, checksum=checksum, where=Where(segment, self.name, chunk))
            for chunk, (file, part, checksum) in enumerate(parts, self.first)
        ]

    def write(
        self,
        io: DirectIO,
        buffer: memoryview,
        *,
        row: int | None = None,
        flush: bool,
        checksum: bool = True,
    ) -> list[Future[int]]:
        """Overwrite the array, or one row: a future per chunk, which gives its checksum."""
        return [
            io.write(file, part, flush=flush, checksum=checksum)
            for file, part in zip(self.files(row), self._parts(buffer), strict=True)
        ]

    def write_now(self, io: DirectIO, buffer: memoryview, *, row: int | None = None) -> list[int]:
        """Overwrite the array, or one row, unflushed, before it returns: the chunks' checksums."""
        return [
            io.write_now(file, part)
            for file, part in zip(self.files(row), self._parts(buffer), strict=True)
        ]

    def checksums(self, row: int | None = None) -> list[int]:
        """Return the xxh3-64 of each chunk file, of one row if the array has rows.

        Reads them through the page cache, a piece at a time, and drops the pages. Raises OSError.
        """
        return [_checksum(file) for file in self.files(row)]

    def _parts(self, buffer: memoryview) -> list[memoryview]:
        if len(buffer) != self.row_bytes:
            raise ValueError(
                f"array {self.name} has {self.row_bytes} bytes, the buffer {len(buffer)}"
            )
        size = self.chunk_bytes
        return [buffer[size * chunk : size * (chunk + 1)] for chunk in range(self.chunks)]

    def metadata(self) -> bytes:
        """Return the content of the array's zarr.json."""
        register()
        length = self.row_bytes // ITEMSIZE[self.dtype]
        chunk = self.chunk_bytes // ITEMSIZE[self.dtype]
        files: dict[str, Buffer] = {}
        zarr.create_array(
            files,
            shape=(length,) if self.rows is None else (self.rows, length),
            chunks=(chunk,) if self.rows is None else (1, chunk),
            dtype=self.dtype,
            fill_value=0,
            filters=None,
            compressors=None,
            serializer=BytesCodec(endian="little" if ITEMSIZE[self.dtype] > 1 else None),
        )
        return files[ZARR_JSON].to_bytes()


def _checksum(path: Path) -> int:
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        # What the cache holds although its writing failed is not what the disk holds.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.intdigest()
