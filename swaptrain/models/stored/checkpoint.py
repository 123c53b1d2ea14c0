"""Weights in safetensors: names, shapes and dtypes now, values when they are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from swaptrain.errors import ConfigError
from swaptrain.models.adapters.refused import refuse_adapters

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint", "open_weights"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_FORMS = (
    *("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle"),
    *("*.h5", "*.msgpack", "*.gguf"),
)
_NOT_WEIGHTS = frozenset({"training_args.bin"})
_FLOATING = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_BLOCK_BYTES = 8 << 20
"""Of a tensor that is read row by row, as stored."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor of a checkpoint lies, and what it is."""

    file: Path
    dtype: str
    """As safetensors writes it: F32, BF16, I64."""
    shape: tuple[int, ...]
    place: int
    """Of its first byte in the file."""

    @property
    def is_floating(self) -> bool:
        """Whether its elements are floating point numbers of 16 bits and more."""
        return self.dtype in _FLOATING

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes in the file, of whole numbers at most."""
        return self.numel * _FLOATING.get(self.dtype, 8)


class Checkpoint:
    """The tensors of one file, or of the files that an index names."""

    def __init__(self, directory: Path, files: list[Path], *, key: str = "model.hf") -> None:
        """Messages name `directory`, which may be the file itself, and `key` of the config."""
        self.directory, self.key = directory, key
        self.tensors: dict[str, StoredTensor] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}
        headers = [self._read_header(file) for file in files]
        self.origin: dict[str, Any] = {
            "directory": str(directory.resolve()),
            "files": [
                {"name": file.name, "stamp": list(self._stamps[file]), "header": header}
                for file, header in zip(files, headers, strict=True)
            ],
        }
        """What tells these files from others: their names, sizes, times and headers."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored, in memory of its own.

        Raises ConfigError where the file cannot be read, or has changed since it was opened.
        """
        return self._read(name, self.tensors[name])

    def _read(self, name: str, stored: StoredTensor) -> torch.Tensor:
        # Not mapped: torch maps a file as if all of it might be written to, which Linux refuses
        # for one that is larger than the memory.
        dtype = self._dtype(name)
        memory = torch.empty(stored.numel * dtype.itemsize, dtype=torch.uint8)
        try:
            if _stamp(stored.file) != self._stamps[stored.file]:
                raise ConfigError(
                    f"{self.key}: {stored.file} has changed while it was being read: run the same "
                    "command again to begin from what it is now"
                )
            with stored.file.open("rb", buffering=0) as file:
                file.seek(stored.place)
                _fill(memory, file)
        except OSError as error:
            text = f"{self.key}: cannot read {name} of {stored.file}: {error}"
            raise ConfigError(text) from error
        return memory.view(dtype).reshape(stored.shape)

    def row_blocks(
        self, name: str, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the first dimension in which a tensor is best read.

        With `first` and `end` of these rows alone.
        """
        stored = self.tensors[name]
        if not stored.shape or not stored.numel:
            return
        rows = max(1, stored.shape[0] * _BLOCK_BYTES // max(1, stored.nbytes))
        last = stored.shape[0] if end is None else end
        for begin in range(first, last, rows):
            yield begin, min(begin + rows, last)

    def block_bytes(self, name: str) -> int:
        """Return the bytes of the largest of the `row_blocks`, as stored and in float32."""
        stored = self.tensors[name]
        rows = max((last - first for first, last in self.row_blocks(name)), default=0)
        elements = rows * stored.numel // max(1, stored.shape[0] if stored.shape else 1)
        return elements * (stored.nbytes // max(1, stored.numel) + 4)

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return a part of a tensor along its first dimension, as `read`."""
        stored = self.tensors[name]
        row_bytes = torch.Size(stored.shape[1:]).numel() * self._dtype(name).itemsize
        shape, place = (last - first, *stored.shape[1:]), stored.place + first * row_bytes
        return self._read(name, replace(stored, shape=shape, place=place))

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"{self.key}: {name} of {stored.file} is stored in {stored.dtype}, which is not "
                "read: save it in a dtype that torch has"
            )
        return _DTYPES[stored.dtype]

    def _read_header(self, path: Path) -> str:
        """Take note of a file and its tensors; return the digest of its header."""
        try:
            self._stamps[path] = _stamp(path)
            # Opened by Python first, which says which error it is: safetensors says "No such file".
            with path.open("rb") as raw, safe_open(path, framework="numpy") as file:
                length = raw.read(8)  # which safetensors has found to be in reason, as all of it
                header = length + raw.read(int.from_bytes(length, "little"))
                places = json.loads(header[8:])
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    part = file.get_slice(name)
                    if name in self.tensors:
                        raise ConfigError(
                            f"{self.key}: {name!r} is in {self.tensors[name].file.name} and in "
                            f"{path.name} of {self.directory}"
                        )
                    begin = len(header) + places[name]["data_offsets"][0]
                    self.tensors[name] = StoredTensor(
                        path, part.get_dtype(), tuple(part.get_shape()), begin
                    )
        except OSError as error:
            text = f"{self.key}: cannot read {path}: {error.strerror or error}"
            raise ConfigError(text) from error
        except SafetensorError as error:
            raise ConfigError(
                f"{self.key}: cannot read {path}: {error}. It is damaged or not whole: fetch it "
                "again"
            ) from error
        return f"{xxhash.xxh3_64_intdigest(header):016x}"


def open_checkpoint(directory: Path) -> Checkpoint | None:
    """Return the weights beside a config.json; None where there are none.

    Raises ConfigError for weights in another form, under another name, or not all there.
    """
    refuse_adapters(directory)
    files = _files(directory, "model.hf")
    if files is not None:
        return Checkpoint(directory, files)
    loose = sorted(directory.glob("*.safetensors"))
    if loose:
        raise ConfigError(
            f"model.hf: {directory} holds {loose[0].name}, but neither {_WEIGHTS} nor {_INDEX}, "
            "which are the names of weights that are started from: rename it, or move it away to "
            "train from the architecture's own initialisation"
        )
    others = sorted(file for file in directory.iterdir() if _is_other_form(file))
    if others:
        raise ConfigError(
            f"model.hf: {directory} holds weights in a form that swaptrain never reads "
            f"({others[0].name}; what is pickled can run code when it is read). Save them as "
            "safetensors, or point model.hf to a directory with the config.json alone"
        )
    return None


def open_weights(path: Path) -> Checkpoint:
    """Return the weights that `model.weights` names: a file, an index, or the directory of them.

    Raises ConfigError for weights in another form, or not all there.
    """
    key = "model.weights"
    if path.is_dir():
        files = _files(path, key)
        if files is not None:
            return Checkpoint(path, files, key=key)
        others = sorted([*path.glob("*.safetensors"), *filter(_is_other_form, path.iterdir())])
        there = f"; it holds {others[0].name}: name the file itself" if others else ""
        raise ConfigError(f"{key}: {path} holds neither {_WEIGHTS} nor {_INDEX}{there}")
    if path.name.endswith(".safetensors"):
        return Checkpoint(path, [_existing(path, key)], key=key)
    if path.name.endswith(".safetensors.index.json"):
        return Checkpoint(path, _indexed(_existing(path, key), key), key=key)
    if _is_other_form(path):
        raise ConfigError(
            f"{key}: {path.name} is no safetensors (what is pickled can run code when it is read): "
            "convert it once with safetensors.torch.save_file(torch.load("
            f"{path.name!r}, weights_only=True), 'model.safetensors')"
        )
    raise ConfigError(
        f"{key}: {path} {'is no file of' if path.exists() else 'does not exist; give a file of'} "
        "safetensors, its index, a directory with either, or a name that the hub's local cache has"
    )


def _files(directory: Path, key: str) -> list[Path] | None:
    """Return the files of weights in a directory by their usual names; None where none is."""
    if os.path.lexists(directory / _WEIGHTS):
        return [_existing(directory / _WEIGHTS, key)]
    if os.path.lexists(directory / _INDEX):
        return _indexed(directory / _INDEX, key)
    return None


def _is_other_form(file: Path) -> bool:
    named = any(fnmatchcase(file.name, pattern) for pattern in _OTHER_FORMS)
    return named and file.name not in _NOT_WEIGHTS


def _indexed(index: Path, key: str) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted({index.parent / name for name in names})
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{key}: cannot read {index}: {error!r}") from error
    there = sum(file.is_file() for file in files)
    for file in files:
        if file.parent != index.parent:
            raise ConfigError(f"{key}: {index} names {file}, which is not beside it")
        _existing(
            file, key, f" ({index.name} names it; {there} of its {len(files)} files are there)"
        )
    return files


def _existing(file: Path, key: str, known: str = "") -> Path:
    if file.is_file():
        return file
    what = "leads to nothing" if file.is_symlink() else "is no file"
    raise ConfigError(f"{key}: {file} {what}{known}: fetch it again")


def _fill(memory: torch.Tensor, file: RawIOBase) -> None:
    """Read as many bytes as there are; raises OSError where the file ends before."""
    left: memoryview = memory.numpy().data
    while left:
        count = file.readinto(left)
        if not count:
            raise OSError("it ends before the tensor does")
        left = left[count:]


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written to or replaced."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
