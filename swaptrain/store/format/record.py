"""A slot's record: the group's zarr.json, of fixed size, with a checksum of itself."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.disk.durable_files import run_error
from swaptrain.strict_json import parse_json

__all__ = ["decode_record", "encode_record", "read_record", "record_size", "write_record"]

_HEAD = b'{"zarr_format":3,"node_type":"group","attributes":{"swaptrain":{"checksum":"'
_BLANK = b"0" * 16
_REST_START = len(_HEAD) + len(_BLANK)
_GRAIN_BYTES = 4096
_FLOAT = "$float"
_NOT_FINITE = ("nan", "inf", "-inf")
_MOST_BYTES = 2**26


def record_size(attributes: Mapping[str, Any]) -> int:
    """Return the bytes to reserve for a record like this one, with room for longer numbers."""
    needed = 2 * len(encode_record(attributes)) + _GRAIN_BYTES
    return -(-needed // _GRAIN_BYTES) * _GRAIN_BYTES


def encode_record(attributes: Mapping[str, Any], size_bytes: int | None = None) -> bytes:
    """Return the bytes of a zarr group with `attributes` under the name `swaptrain`.

    Floats keep every bit (the shortest text that reads back to the same number); NaN and the
    infinities, which JSON lacks, become `{"$float": "nan"}`. Padded with blanks to `size_bytes`;
    the checksum is the xxh3-64 of the whole, with zeros in its own place. Raises RunError when it
    does not fit.
    """
    if "checksum" in attributes:
        raise ValueError("a record makes its own checksum")
    body = json.dumps(
        _to_json(attributes), separators=(",", ":"), allow_nan=False, ensure_ascii=True
    ).encode()
    rest = b'"' + (b"," + body[1:] if len(body) > 2 else b"}") + b"}}"
    size = _REST_START + len(rest)
    if size_bytes is not None:
        if size > size_bytes:
            raise RunError(f"a record of {size} bytes does not fit in {size_bytes}")
        rest += b" " * (size_bytes - size)
    return _HEAD + _digest(rest) + rest


def decode_record(content: bytes, path: Path) -> dict[str, Any]:
    """Return the attributes of a record; raises DamagedStoreError when it does not verify.

    What the attributes say is for `store.format.schema` to check.
    """
    rest = content[_REST_START:]
    if content[:_REST_START] != _HEAD + _digest(rest):
        raise DamagedStoreError("a record does not verify", path=path)
    try:
        group = _from_json(parse_json(content))
    except (ValueError, RecursionError) as error:
        raise DamagedStoreError(
            f"a record is not what swaptrain writes: {error}", path=path
        ) from error
    if group.keys() != {"zarr_format", "node_type", "attributes"} or group["attributes"].keys() != {
        "swaptrain"
    }:
        raise DamagedStoreError("a record is not what swaptrain writes", path=path)
    attributes: dict[str, Any] = group["attributes"]["swaptrain"]
    del attributes["checksum"]
    return attributes


def write_record(path: Path, attributes: Mapping[str, Any], size_bytes: int) -> None:
    """Overwrite a record in place and fdatasync it; raises RunError, and then nothing is switched.

    The file exists and has `size_bytes`: it is neither created nor resized.
    """
    content = encode_record(attributes, size_bytes)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                raise RunError(f"the record {path} does not have {size_bytes} bytes")
            done = 0
            while done < size_bytes:
                written = os.pwrite(descriptor, content[done:], done)
                if not written:
                    raise RunError(f"cannot write {path}: the system took {done} bytes of it")
                done += written
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise run_error(error, path, "write", size_bytes) from error


def read_record(path: Path) -> dict[str, Any]:
    """Return a record's attributes; raises DamagedStoreError when it is missing or not whole."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise DamagedStoreError("a record is missing", path=path) from error
    except OSError as error:
        raise run_error(error, path, "read") from error
    if len(content) > _MOST_BYTES:
        raise DamagedStoreError(f"a record is larger than {_MOST_BYTES:,} bytes", path=path)
    return decode_record(content, path)


def _digest(rest: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(_HEAD + _BLANK + rest).encode()


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _FLOAT:
                raise TypeError(f"a record cannot have the key {key!r}")
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            if value[_FLOAT] not in _NOT_FINITE:
                raise ValueError(f"{_FLOAT} of another number than {', '.join(_NOT_FINITE)}")
            return float(value[_FLOAT])
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return value
