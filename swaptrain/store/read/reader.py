"""Reads tensors of committed slots in pieces, verifying every chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class ChunkReader:
    """Elements of a 1-D array, of which one chunk is in memory; each one's checksum is compared."""

    def __init__(self, array: ArrayFiles, checksums: Sequence[int], *, segment: int) -> None:
        self._array, self._checksums, self._segment = array, checksums, segment
        self._dtype = numpy_dtype(array.dtype)
        self._files = array.files()
        self._cached: tuple[int, NDArray[Any]] | None = None

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return `count` elements from `start` on, as a copy; raises DamagedStoreError."""
        result = np.empty(count, self._dtype)
        chunk_elements = self._array.chunk_bytes // ITEMSIZE[self._array.dtype]
        done = 0
        while done < count:
            chunk, first = divmod(start + done, chunk_elements)
            piece = self._chunk(chunk)[first : first + count - done]
            result[done : done + len(piece)] = piece
            done += len(piece)
        return result

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
            raise DamagedStoreError(
                "a chunk does not verify",
                segment=self._segment,
                array=self._array.name,
                chunk=chunk,
                path=path,
            )
        return content.view(self._dtype)


def read_tensor(reader: ChunkReader, tensor: TensorSpec, offset: int) -> Iterator[NDArray[Any]]:
    """Yield a tensor's elements in row-major order, in 1-D pieces.

    Only a tensor that is stored in another order than row-major is held as a whole.
    """
    if _row_major(tensor):
        for start in range(0, tensor.numel, PIECE_ELEMENTS):
            yield reader.read(offset + start, min(PIECE_ELEMENTS, tensor.numel - start))
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
