"""What the numbers of a `.bin` file are: said by the config, a header, an index, or its content.

A raw file does not say how wide its ids are, and 32-bit ids read as 16-bit are twice as many that
look like ids. So what is impossible is refused, and what is suspicious asks for `data.token_dtype`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swaptrain.errors import ConfigError

__all__ = ["BinForm", "bin_form", "likely_forms"]

_HEADER_BYTES = 1024
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""llm.c: 256 numbers of 32 bits: this magic, a version and the number of ids that follow."""
_MEGATRON = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_INDEX_MAGIC, _OLD_INDEX_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
_OTHER_FILES = (
    (b"\x93NUMPY", "a NumPy file (name it .npy)"),
    (b"PK\x03\x04", "a zip archive, as checkpoints are"),
    (b"\x1f\x8b", "compressed by gzip"), (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
)  # fmt: skip
_SAMPLE = 2**16
_LEAST_SAMPLE = 16
_LEAST_TEXT = 64
_PRINTABLE = np.array([9, 10, 13, *range(32, 127)], dtype=np.uint8)
_SMALL = 3
_TRIED = ("<u2", "|u1", "<u4", "<i8", ">u2", ">u4")


@dataclass(frozen=True)
class BinForm:
    """How the ids lie in a file."""

    dtype: np.dtype[Any]
    offset_bytes: int = 0
    length: int = 0


def bin_form(path: Path, key: str, token_dtype: str | None, vocabulary: int | None) -> BinForm:
    """Return what a `.bin` file holds; raises ConfigError, and OSError where it cannot be read.

    `token_dtype` is the config's. Without it a header of llm.c or the `.idx` of Megatron-LM beside
    the file says it; a file without either is taken as uint16, where its size, the model's
    `vocabulary` and what is in it allow that. A pickle beside it (`meta.pkl`) is never read.
    """
    section = key.partition(".")[0]
    with path.open("rb") as file:
        beginning = file.read(_HEADER_BYTES)
    size_bytes = os.stat(path).st_size
    said = _header(path, key, beginning, size_bytes) or _index(path, key, size_bytes, token_dtype)
    if said is not None:
        if token_dtype not in (None, said.dtype.name):
            raise ConfigError(
                f"{key}: {path} says itself that its ids are {said.dtype.name}, and "
                f"{section}.token_dtype is {token_dtype}: set it to null"
            )
        return said
    dtype = np.dtype(token_dtype or "uint16").newbyteorder("<")
    if size_bytes % dtype.itemsize:
        raise ConfigError(
            f"{key}: {path} has {size_bytes} bytes, which is not a whole number of {dtype.name}: "
            f"set {section}.token_dtype to what its ids are"
        )
    form = BinForm(dtype, 0, size_bytes // dtype.itemsize)
    if token_dtype is None:
        _check_unsaid(path, key, beginning, form, vocabulary)
    return form


def likely_forms(path: Path, form: BinForm, vocabulary: int) -> str:
    """Return a hint for ids beyond the vocabulary: as what they would all be below it."""
    size_bytes = form.length * form.dtype.itemsize
    fitting = []
    for name in _TRIED:
        dtype = np.dtype(name)
        if dtype == form.dtype or size_bytes % dtype.itemsize:
            continue
        ids = _sample(path, dtype, form.offset_bytes, size_bytes)
        if ids.size and ids.min() >= 0 and int(ids.max()) < vocabulary:
            fitting.append(f"big-endian {dtype.name}" if name.startswith(">") else dtype.name)
    return f" (read as {' or '.join(fitting)} its ids would be below that)" if fitting else ""


def _header(path: Path, key: str, beginning: bytes, size_bytes: int) -> BinForm | None:
    if len(beginning) < _HEADER_BYTES:
        return None
    magic, version, count = (int(number) for number in np.frombuffer(beginning, "<i4")[:3])
    if magic not in _HEADERS:
        return None
    expected, name = _HEADERS[magic]
    if version != expected:
        raise ConfigError(
            f"{key}: {path} has the header of llm.c with version {version}, and only {expected} is "
            "known: write its ids as .npy"
        )
    dtype = np.dtype(name).newbyteorder("<")
    items, rest = divmod(size_bytes - _HEADER_BYTES, dtype.itemsize)
    if items != count or rest:
        raise ConfigError(
            f"{key}: {path} has a header that says {count:,} ids of {name}, and "
            f"{size_bytes - _HEADER_BYTES:,} bytes after it: it was cut, or is another file"
        )
    return BinForm(dtype, _HEADER_BYTES, count)


def _index(path: Path, key: str, size_bytes: int, token_dtype: str | None) -> BinForm | None:
    """Read the `.idx` of Megatron-LM beside a file, of which the lengths have to agree."""
    index = path.with_suffix(".idx")
    if not index.is_file():
        return None
    with index.open("rb") as file:
        content = file.read(34)
    lengths = None
    if content.startswith(_INDEX_MAGIC) and len(content) == 34:
        code, count = content[17], int.from_bytes(content[18:26], "little")
        lengths = int(np.fromfile(index, "<i4", count=count, offset=34).sum(dtype=np.int64))
    elif content.startswith(_OLD_INDEX_MAGIC):
        code = int.from_bytes(content[16:24], "little")
    elif token_dtype is not None:
        return None
    else:
        raise ConfigError(
            f"{key}: beside {path} lies {index.name}, which is no index of Megatron-LM: set "
            f"{key.partition('.')[0]}.token_dtype to what the ids are"
        )
    if code not in _MEGATRON:
        raise ConfigError(f"{key}: {index} says that {path.name} holds no integers (code {code})")
    dtype = np.dtype(_MEGATRON[code]).newbyteorder("<")
    items, rest = divmod(size_bytes, dtype.itemsize)
    if rest or lengths not in (None, items):
        raise ConfigError(
            f"{key}: {index} says {lengths or 0:,} ids of {dtype.name}, and {path.name} has "
            f"{size_bytes:,} bytes: one of them was cut, or belongs to another file"
        )
    return BinForm(dtype, 0, items)


def _check_unsaid(
    path: Path, key: str, beginning: bytes, form: BinForm, vocabulary: int | None
) -> None:
    """Raise ConfigError where nothing says that a file is of uint16, and its content denies it."""
    name = f"{key.partition('.')[0]}.token_dtype"
    for start, what in _OTHER_FILES:
        if beginning.startswith(start):
            raise ConfigError(f"{key}: {path} is {what} by its first bytes, and no raw ids")
    ids = _sample(path, form.dtype, 0, form.length * form.dtype.itemsize)
    characters = np.frombuffer(ids.tobytes(), np.uint8)
    if characters.size >= _LEAST_TEXT and np.isin(characters, _PRINTABLE).mean() >= 0.99:
        raise ConfigError(
            f"{key}: {path} looks like text, since nearly all of its bytes are printable: "
            f"name it in {name.partition('.')[0]}.text, or set {name} to uint16 if it holds ids"
        )
    found = _looks_like(ids)
    if vocabulary is not None and vocabulary > 2**16:
        likely = found if found in ("uint32", "int64") else "uint32"
        raise ConfigError(
            f"{key}: {path} does not say how wide its ids are, and uint16 cannot hold all of the "
            f"model's {vocabulary:,}: set {name}, probably to {likely} (uint16 if all are below "
            "65,536)"
        )
    if found == "big-endian uint16":
        raise ConfigError(
            f"{key}: {path} looks like big-endian uint16, since nearly all of its numbers are "
            f"multiples of 256: swap its bytes, or set {name} to uint16 if it is right as it is"
        )
    if found is not None:
        raise ConfigError(
            f"{key}: {path} looks like {found}, since nearly every second number of 16 bits is 0: "
            f"set {name} to {found}, or to uint16 if it is right as it is"
        )


def _looks_like(ids: np.ndarray[Any, Any]) -> str | None:
    """Return what a sample of uint16 is more likely; None where nothing speaks against uint16."""
    if ids.size < _LEAST_SAMPLE or not ids.any():
        return None
    ids = ids[: ids.size // 4 * 4]
    for parity in (1, 0):
        high, low = ids[parity::2], ids[1 - parity :: 2]
        zeros = (high == 0).mean() >= 0.99 and (low == 0).mean() < 0.9
        small = (high <= _SMALL).mean() >= 0.99 and (low <= _SMALL).mean() < 0.6
        if zeros or small:
            wide = (ids[2::4] == 0).mean() >= 0.99 and (ids[3::4] == 0).mean() >= 0.99
            return "int64" if wide and parity else "uint32"
    if (ids % 256 == 0).mean() >= 0.99:
        return "big-endian uint16"
    return None


def _sample(
    path: Path, dtype: np.dtype[Any], offset_bytes: int, size_bytes: int
) -> np.ndarray[Any, Any]:
    """Return numbers from the beginning and from the middle of a file."""
    count = size_bytes // dtype.itemsize
    first = np.fromfile(path, dtype, count=min(count, _SAMPLE), offset=offset_bytes)
    if count <= _SAMPLE:
        return first
    middle = count // 2 // 4 * 4
    later = np.fromfile(
        path,
        dtype,
        count=min(count - middle, _SAMPLE),
        offset=offset_bytes + middle * dtype.itemsize,
    )
    return np.concatenate([first, later])
