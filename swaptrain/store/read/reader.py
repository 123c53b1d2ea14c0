"""Reads tensors of committed slots in pieces, verifying every chunk."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from swaptrain.errors import DamagedStoreError
from swaptrain.program.tensors import ITEMSIZE, TensorSpec
from swaptrain.store.disk.durable_files import run_error
from swaptrain.store.format.bfloat16 import numpy_dtype
from swaptrain.store.slots.array_files import ArrayFiles

__all__ = ["PIECE_ELEMENTS", "ChunkReader", "read_tensor"]

PIECE_ELEMENTS = 4 * 2**20
"""Elements of one piece of a tensor."""
_MADV_POPULATE_READ = 22
"""Of Linux 5.14; Python 3.11 has no name for it. Reads the pages, and says where that fails."""
_CACHE_LINE_BYTES = 64
"""Kernels may give other bits for tensors that begin elsewhere."""


class ChunkReader:
    """Elements of a 1-D array, of which one chunk is in memory; each one's checksum is compared.

    Where `verified` is given, a chunk is compared once, and noted in it. From then on only what is
    asked for is mapped of its file: for those who read the same tensors again and again.
    """

    def __init__(
        self,
        array: ArrayFiles,
        checksums: Sequence[int],
        *,
        segment: int,
        verified: set[int] | None = None,
    ) -> None:
        self._array, self._checksums, self._segment = array, checksums, segment
        self._dtype = numpy_dtype(array.dtype)
        self._files, self.verified = array.files(), verified
        self._cached: tuple[int, NDArray[Any]] | None = None

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return `count` elements from `start` on, as a copy; raises DamagedStoreError."""
        chunk_elements = self._array.chunk_bytes // ITEMSIZE[self._array.dtype]
        chunk, first = divmod(start, chunk_elements)
        is_aligned = first * self._dtype.itemsize % _CACHE_LINE_BYTES == 0
        within = is_aligned and first + count <= chunk_elements
        if count and within and self._may_read_part(chunk):
            return self._part(chunk, first, count)
        result = np.empty(count, self._dtype)
        done = 0
        while done < count:
            chunk, first = divmod(start + done, chunk_elements)
            wanted = min(count - done, chunk_elements - first)
            if self._may_read_part(chunk):
                piece = self._part(chunk, first, wanted)
            else:
                piece = self._chunk(chunk)[first : first + wanted]
            result[done : done + len(piece)] = piece
            done += len(piece)
        return result

    def _may_read_part(self, chunk: int) -> bool:
        is_here = self._cached is not None and self._cached[0] == chunk
        return self.verified is not None and chunk in self.verified and not is_here

    def _part(self, chunk: int, first: int, count: int) -> NDArray[Any]:
        """Return elements of a chunk that has been compared: its pages, mapped, as they are."""
        path = self._files[chunk]
        begin, size = first * self._dtype.itemsize, count * self._dtype.itemsize
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            with path.open("rb") as file:
                # A mapping beyond the end would end the process where it is read.
                if os.fstat(file.fileno()).st_size != self._array.chunk_bytes:
                    raise self._damaged(chunk, path)
                try:
                    flags = mmap.MAP_PRIVATE
                    pages = mmap.mmap(file.fileno(), begin - page + size, flags, offset=page)
                except OSError:  # of a file system that maps nothing
                    return np.fromfile(file, self._dtype, count, offset=begin)
            try:
                pages.madvise(_MADV_POPULATE_READ)
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a kernel before 5.14
                    raise
                pages.madvise(mmap.MADV_WILLNEED)
        except OSError as error:
            raise run_error(error, path, "read") from error
        return np.frombuffer(pages, self._dtype, count, begin - page)

    def _damaged(self, chunk: int, path: Path) -> DamagedStoreError:
        return DamagedStoreError(
            "a chunk does not verify",
            segment=self._segment,
            array=self._array.name,
            chunk=chunk,
            path=path,
        )

    def _chunk(self, chunk: int) -> NDArray[Any]:
        if self._cached is None or self._cached[0] != chunk:
            self._cached = None  # one chunk at a time, also while the next one is read
            self._cached = chunk, self._load(chunk)
        return self._cached[1]

    def _load(self, chunk: int) -> NDArray[Any]:
        path = self._files[chunk]
        try:
            content = np.fromfile(path, np.uint8)
        except FileNotFoundError:
            content = np.empty(0, np.uint8)
        except OSError as error:
            raise run_error(error, path, "read") from error
        whole = len(content) == self._array.chunk_bytes
        if not whole or xxhash.xxh3_64_intdigest(content.data) != self._checksums[chunk]:
            raise self._damaged(chunk, path)
        if self.verified is not None:
            self.verified.add(chunk)
        return content.view(self._dtype)


def read_tensor(reader: ChunkReader, tensor: TensorSpec, offset: int) -> Iterator[NDArray[Any]]:
    """Yield a tensor's elements in row-major order, in 1-D pieces; in one where they come again.

    Only a tensor that is stored in another order than row-major is held as a whole.
    """
    if _row_major(tensor):
        most = PIECE_ELEMENTS if reader.verified is None else max(1, tensor.numel)
        for start in range(0, tensor.numel, most):
            yield reader.read(offset + start, min(most, tensor.numel - start))
        return
    storage = reader.read(offset, tensor.extent)
    strides = tuple(step * tensor.itemsize for step in tensor.stride)
    view = np.lib.stride_tricks.as_strided(storage, tensor.shape, strides, writeable=False)
    flat = view.reshape(-1)
    for start in range(0, tensor.numel, PIECE_ELEMENTS):
        yield flat[start : start + PIECE_ELEMENTS]


def _row_major(tensor: TensorSpec) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and step != expected:
            return tensor.numel == 0
        expected *= size
    return True
