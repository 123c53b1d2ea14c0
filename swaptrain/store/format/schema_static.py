"""What the metadata of buffers that never change may say: plain zarr arrays of any shape."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.store.format.checks import MOST_ELEMENTS, check_array_keys, plain_codecs
from swaptrain.store.paths import ZARR_JSON
from swaptrain.strict_json import read_json

__all__ = ["check_static", "check_static_array"]

_MOST_METADATA_BYTES = 2**16


def check_static(record: Mapping[str, Any], directory: Path) -> None:
    """Check the record of a group of buffers: the checksum of each file, by relative path.

    The paths are compared with what lies in the directory, and never opened.
    """
    sums = record.get("checksums")
    if (
        record.keys() != {"checksums"}
        or not isinstance(sums, dict)
        or not all(type(value) is int for value in sums.values())
    ):
        raise DamagedStoreError(
            "a record does not have the checksums of files", path=directory / ZARR_JSON
        )


def check_static_array(folder: Path) -> None:
    """Check one array before zarr reads it: plain bytes, and as large as its files are.

    Raises DamagedStoreError.
    """
    path = folder / ZARR_JSON
    try:
        metadata = read_json(path, _MOST_METADATA_BYTES)
    except (OSError, ValueError) as error:
        raise DamagedStoreError(
            f"an array's metadata cannot be read: {error}", path=path
        ) from error
    check_array_keys(metadata, path)
    shape, dtype = metadata["shape"], metadata["data_type"]
    grid = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    if len(grid) != len(shape) or 0 in grid or prod(shape) > MOST_ELEMENTS:
        raise DamagedStoreError(f"an array has the shape {shape} in chunks of {grid}", path=path)
    if metadata["codecs"] not in plain_codecs(dtype):
        raise DamagedStoreError("an array has other codecs than plain bytes", path=path)
    files = [file for file in folder.rglob("*") if file.is_file() and file != path]
    chunks = prod(-(-size // part) for size, part in zip(shape, grid, strict=True))
    chunk_bytes = prod(grid) * ITEMSIZE[dtype]
    if len(files) != chunks or any(file.stat().st_size != chunk_bytes for file in files):
        raise DamagedStoreError(
            f"an array of shape {shape} has {chunks} chunks of {chunk_bytes} bytes, but its files "
            "are others",
            path=folder,
        )
