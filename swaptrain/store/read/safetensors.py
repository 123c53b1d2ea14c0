"""A safetensors file written as a stream, which the library of that name cannot do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swaptrain.errors import ConfigError, RunError
from swaptrain.store.access.lock import is_named, open_lock_file, try_lock
from swaptrain.store.disk.durable_files import flush_directory, free_bytes, run_error
from swaptrain.store.format.bfloat16 import numpy_dtype
from swaptrain.units import format_size

__all__ = ["DTYPE_NAMES", "StreamedTensor", "cast_piece", "check_float16", "write_safetensors"]

DTYPE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor whose elements come in pieces, in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Iterable[NDArray[Any]]


def write_safetensors(path: Path, tensors: Sequence[StreamedTensor]) -> int:
    """Write a file that is there as a whole or not at all: aside, fsync, rename, fsync.

    The format is an 8-byte length, a JSON header with each tensor's dtype, shape and byte range,
    and the ranges (github.com/huggingface/safetensors). Wider dtypes come first, so that every
    tensor is aligned. Returns its bytes. Raises RunError (disk full, another process writes it),
    and then leaves nothing behind.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.nbytes // max(1, _numel(tensor)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"safetensors has no dtype {tensor.dtype}, which {tensor.name} has")
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    total_bytes = 8 + len(text) + end
    free = free_bytes(path)
    if free is not None and total_bytes > free:
        raise RunError(
            f"cannot write {path}: it will have {format_size(total_bytes)}, {format_size(free)} "
            "are free there: make room, or write it to another disk"
        )
    aside = path.with_name(path.name + ".partial")
    with _aside(aside) as descriptor:
        try:
            _write(descriptor, len(text).to_bytes(8, "little") + text)
            for tensor in ordered:
                written = sum(_write(descriptor, _bytes(piece)) for piece in _ahead(tensor.pieces))
                if written != tensor.nbytes:
                    raise RunError(f"{tensor.name}: {written} of {tensor.nbytes} bytes were read")
            os.fsync(descriptor)
            aside.replace(path)
        except OSError as error:
            raise run_error(error, path, "write", total_bytes) from error
    flush_directory(path.parent)
    return total_bytes


def cast_piece(piece: NDArray[Any], dtype: str, name: str) -> NDArray[Any]:
    """Return a piece in another dtype; raises ConfigError where float16 has no such number.

    `name`: the tensor's, for the message.
    """
    with np.errstate(over="ignore"):  # said below, with the tensor's name
        found = piece.astype(numpy_dtype(dtype), copy=False)
    if dtype == "float16":
        check_float16(found, name)
    return found


def check_float16(piece: NDArray[Any], name: str) -> None:
    """Raise ConfigError where a number of a piece has become infinite."""
    if np.isinf(piece).any():
        raise ConfigError(
            f"--dtype float16: {name} has numbers beyond 65,504, the largest of float16: take "
            "bfloat16 or float32"
        )


@contextmanager
def _aside(path: Path) -> Iterator[int]:
    """Open an empty file for this process alone; afterwards the name is gone.

    What a killed process left under the name is overwritten. Raises RunError.
    """
    descriptor = open_lock_file(path)
    try:
        if not (try_lock(descriptor) and is_named(descriptor, path)):
            raise RunError(f"another process is writing {path}: wait until it is done")
        try:
            os.ftruncate(descriptor, 0)
            yield descriptor
        finally:
            if is_named(descriptor, path):
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _ahead(pieces: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Yield the pieces; while one is written the next is read, on a thread."""
    with ThreadPoolExecutor(1) as pool:
        source = iter(pieces)
        coming = pool.submit(next, source, None)
        while (piece := coming.result()) is not None:
            coming = pool.submit(next, source, None)
            yield piece


def _bytes(piece: NDArray[Any]) -> memoryview:
    """Return the bytes of a piece in row-major order, without a copy where they lie so."""
    flat: Any = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _write(descriptor: int, content: bytes | memoryview) -> int:
    """Write all of it and return how much that is; raises OSError."""
    done = 0
    while done < len(content):
        done += os.write(descriptor, memoryview(content)[done:])
    return done


def _numel(tensor: StreamedTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count
