"""What the metadata of a store may say: checked before anything is done with it.

A checksum shows that bytes are those that were written, not that somebody meant well: a run
directory may come from somebody else. Every check raises DamagedStoreError, naming what was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from swaptrain.errors import DamagedStoreError
from swaptrain.program.tensors import ITEMSIZE

__all__ = ["MOST_ELEMENTS", "ArrayShape", "array_shape", "check_array_keys"]
__all__ += [
    "check_kept",
    "check_state",
    "check_table",
    "plain_codecs",
]

MOST_ELEMENTS = 2**48
"""Of one tensor or array: more than any disk holds."""
_MOST_DIMENSIONS = 64
_PAGE_BYTES = 4096
_MOST_CHUNK_BYTES = 2**30
_MOST_NUMBER = 2**63 - 1
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MOST_TEXT = 1024

Check = Callable[[Any], bool]


def check_state(record: Mapping[str, Any], path: Path) -> None:
    """Check the record of a slot, as far as it goes by itself."""
    _keys(record, _STATE, path, "a record", optional={"metadata": _metadata})
    _check_handoff(record, path)
    for row in record["table"]:
        _keys(row, _TABLE_ROW, path, "a row of the table")
        name, shape, stride = row["name"], row["shape"], row["stride"]
        if len(shape) != len(stride):
            raise _bad(f"{name} has {len(shape)} sizes and {len(stride)} strides", path)
        if row["array"] not in record["checksums"]:
            raise _bad(f"{name} lies in an array that has no checksums", path)


def check_kept(record: Mapping[str, Any], path: Path) -> None:
    """Check the record of what is kept of a segment beside its slot."""
    _keys(record, _KEPT, path, "a record")
    _check_handoff(record, path)


def _check_handoff(record: Mapping[str, Any], path: Path) -> None:
    if record["handoff"].keys() - {"gradients"}:
        raise _bad("the hand-off of a record has unknown keys", path)
    for row in record["handoff"].get("gradients", ()):
        _keys(row, _HANDOFF_ROW, path, "a row of the hand-off", optional={"row": _row})


def check_array_keys(metadata: Any, path: Path) -> None:
    """Check what the zarr.json of any array of a store has, one value at a time."""
    name = path.parent.name
    _keys(metadata, _ARRAY, path, "an array's metadata", array=name)


@dataclass(frozen=True)
class ArrayShape:
    """What an array's metadata says: 1-D of `chunks` equal chunks, or so many in each row."""

    dtype: str
    chunk_bytes: int
    chunks: int
    rows: int | None


class Shaped(Protocol):
    """Anything that has the fields of an ArrayShape."""

    @property
    def dtype(self) -> str: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def rows(self) -> int | None: ...


def array_shape(metadata: Any, path: Path) -> ArrayShape:
    """Return what the zarr.json of an array says, if it is one as swaptrain writes them."""
    name = path.parent.name
    check_array_keys(metadata, path)
    if not _zero(metadata["fill_value"]):
        raise _bad("an array has another fill value than 0", path, name)
    shape, dtype = metadata["shape"], metadata["data_type"]
    grid = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    if not 1 <= len(shape) <= 2 or len(grid) != len(shape) or any(n < 1 for n in (*shape, *grid)):
        raise _bad(f"an array has the shape {shape} and chunks of {grid}", path, name)
    if any(size % part for size, part in zip(shape, grid, strict=True)) or grid[:-1] != [1] * (
        len(grid) - 1
    ):
        raise _bad(f"an array of shape {shape} is not made of chunks of {grid}", path, name)
    chunk_bytes = grid[-1] * ITEMSIZE[dtype]
    if chunk_bytes > _MOST_CHUNK_BYTES or chunk_bytes % _PAGE_BYTES or prod(shape) > MOST_ELEMENTS:
        raise _bad(f"an array of shape {shape} has chunks of {chunk_bytes} bytes", path, name)
    if metadata["codecs"] not in plain_codecs(dtype):
        raise _bad("an array has other codecs than plain bytes", path, name)
    rows = shape[0] if len(shape) == 2 else None
    return ArrayShape(dtype, chunk_bytes, shape[-1] // grid[-1], rows)


def check_table(
    record: Mapping[str, Any], arrays: Mapping[str, Shaped], path: Path, segment: int
) -> None:
    """Check that the arrays and the tensors of a record fit the arrays that are on the disk.

    Each chunk has a checksum; each tensor lies inside its array, and no two tensors overlap.
    """
    for name, sums in record["checksums"].items():
        found = arrays.get(name)
        if found is None:
            raise DamagedStoreError("an array is missing", segment=segment, array=name, path=path)
        if len(sums) != found.chunks or found.rows is not None:
            raise DamagedStoreError(
                f"an array has {found.chunks} chunks, its record {len(sums)} checksums",
                segment=segment,
                array=name,
                path=path,
            )
    ends: dict[str, list[tuple[int, int, str]]] = {}
    for row in record["table"]:
        found = arrays[row["array"]]
        extent = _extent(row["shape"], row["stride"])
        end = row["offset"] + extent
        if row["dtype"] != found.dtype or prod(row["shape"]) > max(extent, 0):
            what = f"{row['name']}, {row['dtype']} of {row['shape']}, is not laid out as it can be"
        elif end * ITEMSIZE[found.dtype] > found.chunk_bytes * found.chunks:
            what = f"{row['name']} ends behind its array"
        else:
            ends.setdefault(row["array"], []).append((row["offset"], end, row["name"]))
            continue
        raise DamagedStoreError(what, segment=segment, array=row["array"], path=path)
    for name, spans in ends.items():
        spans.sort()
        for (_, end, before), (start, _, after) in pairwise(spans):
            if start < end or before == after:
                raise DamagedStoreError(
                    f"{before} and {after} overlap", segment=segment, array=name, path=path
                )


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _keys(
    found: Any,
    wanted: Mapping[str, Check],
    path: Path,
    what: str,
    *,
    optional: Mapping[str, Check] = MappingProxyType({}),
    array: str | None = None,
) -> None:
    """Check that an object has the keys and that each value is as it has to be.

    Further keys are let be: nobody reads them.
    """
    if not isinstance(found, dict):
        raise _bad(f"{what} is not an object", path, array)
    for key in wanted:
        if key not in found:
            raise _bad(f"{what} lacks {key}", path, array)
    for key, check in {**wanted, **optional}.items():
        if key in found and not check(found[key]):
            raise _bad(f"{what} has an impossible value of {key}", path, array)


def _bad(what: str, path: Path, array: str | None = None) -> DamagedStoreError:
    return DamagedStoreError(what, array=array, path=path)


def _whole(least: int, most: int = _MOST_NUMBER) -> Check:
    return lambda found: type(found) is int and least <= found <= most


def _number(found: Any) -> bool:
    """Accept a float, or a whole number: JSON's 1.0 may have been written as 1."""
    return type(found) is float or (type(found) is int and abs(found) < _MOST_NUMBER)


def _text(found: Any) -> bool:
    """Accept text that can be a name, and does nothing to a terminal that shows it."""
    return isinstance(found, str) and len(found) <= _MOST_TEXT and not _CONTROL.search(found)


def _name(found: Any) -> bool:
    return _text(found) and found != ""


def _array_name(found: Any) -> bool:
    return isinstance(found, str) and _ARRAY_NAME.fullmatch(found) is not None


def _dtype(found: Any) -> bool:
    return isinstance(found, str) and found in ITEMSIZE


def _list_of(check: Check, most: int | None = None) -> Check:
    return lambda found: (
        isinstance(found, list)
        and (most is None or len(found) <= most)
        and all(check(item) for item in found)
    )


def _mapping(key: Check, value: Check) -> Check:
    return lambda found: (
        isinstance(found, dict) and all(key(k) and value(v) for k, v in found.items())
    )


def _row(found: Any) -> bool:
    return found is None or (type(found) is int and 0 <= found <= _MOST_NUMBER)


def _anything(_: Any) -> bool:
    return True


def _grid(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.get("name") == "regular"
        and isinstance(found.get("configuration"), dict)
        and _sizes(found["configuration"].get("chunk_shape"))
    )


def _zero(found: Any) -> bool:
    """Whether it is the fill value 0: a number, or of complex numbers the two parts of one."""
    parts = found if isinstance(found, list) and len(found) == 2 else [found]
    return all(type(part) in {bool, int, float} and part == 0 for part in parts)


def plain_codecs(dtype: str) -> list[list[dict[str, Any]]]:
    """Return the two ways to write that the bytes are the array's, without endianness for bytes."""
    if ITEMSIZE[dtype] == 1:
        return [[{"name": "bytes"}], [{"name": "bytes", "configuration": {}}]]
    return [[{"name": "bytes", "configuration": {"endian": "little"}}]]


_sizes = _list_of(_whole(0, MOST_ELEMENTS), _MOST_DIMENSIONS)
_checksum = _whole(0, 2**64 - 1)
_checksums = _mapping(_array_name, _list_of(_checksum))
_metadata = _mapping(_array_name, _checksum)
_losses = _list_of(_number)


def _handoff(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("gradients", []), list)


_norms = _mapping(_name, lambda found: _number(found) and not (found < 0))
_keys_of_separator = {"name": "default", "configuration": {"separator": "/"}}

_STATE: dict[str, Check] = {
    "segment": _whole(1),
    "version": _whole(0),
    "fingerprint": _name,
    "checksums": _checksums,
    "handoff": _handoff,
    "losses": _losses,
    "norms": _norms,
    "table": lambda found: isinstance(found, list),
}
_HANDOFF_ROW: dict[str, Check] = {
    "name": _name,
    "segment": _whole(1),
    "micro_batch": _whole(0),
    "checksums": _list_of(_checksum),
}
_TABLE_ROW: dict[str, Check] = {
    "name": _name,
    "shape": _sizes,
    "stride": _sizes,
    "dtype": _dtype,
    "array": _array_name,
    "offset": _whole(0, MOST_ELEMENTS),
}
_KEPT: dict[str, Check] = {
    "segment": _whole(1),
    "version": _whole(0),
    "fingerprint": _name,
    "checksums": _checksums,
    "losses": _losses,
    "norms": _norms,
    "handoff": _handoff,
}
_ARRAY: dict[str, Check] = {
    "zarr_format": lambda found: type(found) is int and found == 3,
    "node_type": lambda found: found == "array",
    "data_type": _dtype,
    "shape": _sizes,
    "chunk_grid": _grid,
    "chunk_key_encoding": lambda found: found == _keys_of_separator,
    "fill_value": lambda found: _zero(found) or not isinstance(found, dict | list),
    "codecs": lambda found: isinstance(found, list),
}
