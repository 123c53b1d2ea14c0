"""The safetensors of a Hugging Face directory: names, shapes and dtypes now, values when asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from swaptrain.errors import ConfigError

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_NOT_WEIGHTS = frozenset({"training_args.bin"})
_FLOATING = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor of a checkpoint lies, and what it is."""

    file: Path
    dtype: str
    """As safetensors writes it: F32, BF16, I64."""
    shape: tuple[int, ...]

    @property
    def is_floating(self) -> bool:
        """Whether its elements are floating point numbers of 16 bits and more."""
        return self.dtype in _FLOATING

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * (_FLOATING | _OTHERS)[self.dtype]


class Checkpoint:
    """The tensors of one file, or of the files that an index names."""

    def __init__(self, directory: Path, files: list[Path]) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self._files = files
        for file in files:
            self._read_header(file)

    @property
    def origin(self) -> dict[str, Any]:
        """What tells these files from others: their names, sizes, times and headers."""
        return {
            "directory": str(self.directory.resolve()),
            "files": [
                {
                    "name": file.name,
                    "bytes": file.stat().st_size,
                    "modified_ns": file.stat().st_mtime_ns,
                    "header": f"{xxhash.xxh3_64_intdigest(_header(file)):016x}",
                }
                for file in self._files
            ],
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored; raises ConfigError where the file has changed since.

        It shows the file's pages as long as it lives, and takes no other memory.
        """
        stored = self.tensors[name]
        try:
            with safe_open(stored.file, framework="pt") as file:
                found: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.hf: cannot read {name} of {stored.file}: {error}") from error
        if tuple(found.shape) != stored.shape:
            raise ConfigError(f"model.hf: {stored.file} has changed while it was being read")
        return found

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    part = file.get_slice(name)
                    stored = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
                    if name in self.tensors:
                        raise ConfigError(
                            f"model.hf: {name} is in {self.tensors[name].file.name} and in "
                            f"{path.name} of {self.directory}"
                        )
                    if stored.dtype not in _FLOATING | _OTHERS:
                        raise ConfigError(
                            f"model.hf: {name} of {path} is stored in {stored.dtype}: swaptrain "
                            "trains weights of 16 bits and more; convert the checkpoint first"
                        )
                    self.tensors[name] = stored
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"model.hf: cannot read {path}: {error}. It is damaged or not whole: fetch it again"
            ) from error


def open_checkpoint(directory: Path) -> Checkpoint | None:
    """Return the weights beside a config.json; None where there are none.

    Raises ConfigError for weights that are pickled, not named as transformers names them, or not
    all there.
    """
    if (directory / _WEIGHTS).is_file():
        return Checkpoint(directory, [directory / _WEIGHTS])
    if (directory / _INDEX).is_file():
        return Checkpoint(directory, _indexed(directory))
    loose = sorted(directory.glob("*.safetensors"))
    if loose:
        raise ConfigError(
            f"model.hf: {directory} holds {loose[0].name}, but neither {_WEIGHTS} nor {_INDEX}, "
            "which are the names of weights that are started from: rename it, or move it away to "
            "train from the architecture's own initialisation"
        )
    pickled = sorted(
        found
        for found in directory.glob("*")
        if found.suffix in _PICKLED and found.name not in _NOT_WEIGHTS
    )
    if pickled:
        raise ConfigError(
            f"model.hf: {directory} holds weights that are pickled ({pickled[0].name}), which can "
            "run code when they are read: swaptrain never reads them. Save them as safetensors, or "
            "point model.hf to a directory with the config.json alone"
        )
    return None


def _indexed(directory: Path) -> list[Path]:
    index = directory / _INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [directory / name for name in names]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"model.hf: cannot read {index}: {error!r}") from error
    for file in files:
        if file.parent != directory:
            raise ConfigError(f"model.hf: {index} names {file}, which is not beside it")
        if not file.is_file():
            there = sum(file.is_file() for file in files)
            raise ConfigError(
                f"model.hf: {file} does not exist, which {index.name} names ({there} of "
                f"{len(files)} files are there): fetch the rest"
            )
    return files


def _header(path: Path) -> bytes:
    """Return the length and the JSON that a safetensors file begins with."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))
