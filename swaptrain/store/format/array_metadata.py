"""The zarr.json of an array: the form that swaptrain writes, and the one form that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from swaptrain.errors import DamagedStoreError
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.store.format.schema import MOST_ELEMENTS, Dtype, Record, Sizes

__all__ = ["ArrayMetadata", "ArrayShape", "array_shape", "plain_codecs"]

_PAGE_BYTES = 4096
_MOST_CHUNK_BYTES = 2**30


def _fill_value(found: Any) -> Any:
    if isinstance(found, dict | list) and not _is_zero(found):
        raise ValueError("not a number")
    return found


class _Section(Record):
    """An object inside the metadata: what zarr says beyond the keys here, nobody reads."""

    model_config = ConfigDict(extra="ignore")


class _GridConfiguration(_Section):
    chunk_shape: Sizes


class _Grid(_Section):
    name: Literal["regular"]
    configuration: _GridConfiguration


class _Separator(Record):
    separator: Literal["/"]


class _ChunkKeys(Record):
    name: Literal["default"]
    configuration: _Separator


class ArrayMetadata(_Section):
    """Metadata of any array of a store, one key at a time."""

    title: ClassVar[str] = "an array's metadata"
    zarr_format: Annotated[int, Field(ge=3, le=3)]
    node_type: Literal["array"]
    data_type: Dtype
    shape: Sizes
    chunk_grid: _Grid
    chunk_key_encoding: _ChunkKeys
    fill_value: Annotated[Any, AfterValidator(_fill_value)]
    codecs: list[Any]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Elements of a chunk by dimension."""
        return self.chunk_grid.configuration.chunk_shape

    def check_codecs(self, path: Path, array: str | None = None) -> None:
        """Raise DamagedStoreError unless the bytes of a chunk are those of its elements."""
        if self.codecs not in plain_codecs(self.data_type):
            text = "an array has other codecs than plain bytes"
            raise DamagedStoreError(text, array=array, path=path)


@dataclass(frozen=True)
class ArrayShape:
    """An array of swaptrain: 1-D of `chunks` equal chunks, or so many in each row."""

    dtype: str
    chunk_bytes: int
    chunks: int
    rows: int | None


def array_shape(found: object, path: Path) -> ArrayShape:
    """Return the shape that the zarr.json of an array says, if swaptrain writes such arrays."""
    name = path.parent.name
    metadata = ArrayMetadata.checked(found, path, array=name)

    def bad(text: str) -> DamagedStoreError:
        return DamagedStoreError(text, array=name, path=path)

    if not _is_zero(metadata.fill_value):
        raise bad("an array has another fill value than 0")
    shape, grid = metadata.shape, metadata.chunk_shape
    if not 1 <= len(shape) <= 2 or len(grid) != len(shape) or any(n < 1 for n in (*shape, *grid)):
        raise bad(f"an array has the shape {list(shape)} and chunks of {list(grid)}")
    if any(size % part for size, part in zip(shape, grid, strict=True)) or set(grid[:-1]) - {1}:
        raise bad(f"an array of shape {list(shape)} is not made of chunks of {list(grid)}")
    chunk_bytes = grid[-1] * ITEMSIZE[metadata.data_type]
    if chunk_bytes > _MOST_CHUNK_BYTES or chunk_bytes % _PAGE_BYTES or prod(shape) > MOST_ELEMENTS:
        raise bad(f"an array of shape {list(shape)} has chunks of {chunk_bytes} bytes")
    metadata.check_codecs(path, name)
    rows = shape[0] if len(shape) == 2 else None
    return ArrayShape(metadata.data_type, chunk_bytes, shape[-1] // grid[-1], rows)


def plain_codecs(dtype: str) -> list[list[dict[str, Any]]]:
    """Return the two ways to write that the bytes are the array's, without endianness for bytes."""
    if ITEMSIZE[dtype] == 1:
        return [[{"name": "bytes"}], [{"name": "bytes", "configuration": {}}]]
    return [[{"name": "bytes", "configuration": {"endian": "little"}}]]


def _is_zero(found: Any) -> bool:
    """Whether it is the fill value 0: a number, or of complex numbers the two parts of one."""
    parts = found if isinstance(found, list) and len(found) == 2 else [found]
    return all(type(part) in {bool, int, float} and part == 0 for part in parts)
