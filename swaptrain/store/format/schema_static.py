"""What the metadata of buffers that never change may say: plain zarr arrays of any shape."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import ClassVar

from swaptrain.errors import DamagedStoreError
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.store.format.array_metadata import ArrayMetadata
from swaptrain.store.format.schema import MOST_ELEMENTS, Checksum, Record
from swaptrain.store.paths import ZARR_JSON
from swaptrain.strict_json import read_json

__all__ = ["StaticRecord", "check_static_array"]

_MOST_METADATA_BYTES = 2**16


class StaticRecord(Record):
    """Record of a group of buffers that never change."""

    title: ClassVar[str] = "the record of the buffers"
    checksums: dict[str, Checksum]
    """By relative path of each file; compared with what lies in the directory, never opened."""


def check_static_array(folder: Path) -> None:
    """Check one array before zarr reads it: plain bytes, and as large as its files are.

    Raises DamagedStoreError.
    """
    path = folder / ZARR_JSON
    try:
        found = read_json(path, _MOST_METADATA_BYTES)
    except (OSError, ValueError) as error:
        raise DamagedStoreError(
            f"an array's metadata cannot be read: {error}", path=path
        ) from error
    metadata = ArrayMetadata.checked(found, path, array=folder.name)
    shape, grid = metadata.shape, metadata.chunk_shape
    if len(grid) != len(shape) or 0 in grid or prod(shape) > MOST_ELEMENTS:
        text = f"an array has the shape {list(shape)} in chunks of {list(grid)}"
        raise DamagedStoreError(text, path=path)
    metadata.check_codecs(path)
    files = [file for file in folder.rglob("*") if file.is_file() and file != path]
    chunks = prod(-(-size // part) for size, part in zip(shape, grid, strict=True))
    chunk_bytes = prod(grid) * ITEMSIZE[metadata.data_type]
    if len(files) != chunks or any(file.stat().st_size != chunk_bytes for file in files):
        raise DamagedStoreError(
            f"an array of shape {list(shape)} has {chunks} chunks of {chunk_bytes} bytes, but its "
            "files are others",
            path=folder,
        )
