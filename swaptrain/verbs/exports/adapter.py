"""The adapters of a run: as PEFT writes them, or merged into their base."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swaptrain.errors import ConfigError
from swaptrain.store.disk.durable_files import flush_directory, make_directory, write_aside
from swaptrain.store.format.root import AdapterRecord, MergeRecord
from swaptrain.store.read.safetensors import StreamedTensor, check_float16, write_safetensors

__all__ = ["adapter_of", "merged_tensors", "write_adapter"]

Tensors = Mapping[str, StreamedTensor]


def adapter_of(run: Path, record: AdapterRecord | None, option: str) -> AdapterRecord:
    """Return what is recorded of a run's adapters; raises ConfigError where it has none."""
    if record is None:
        raise ConfigError(f"{option}: {run} trains the model itself, and has no adapter")
    return record


def write_adapter(to: Path, record: AdapterRecord, tensors: Tensors) -> int:
    """Write adapter_config.json and adapter_model.safetensors as PEFT does; return the bytes."""
    make_directory(to)
    text = json.dumps(record.config, indent=2, sort_keys=True)
    write_aside(to / "adapter_config.json", text.encode())
    saved = [replace(tensors[name], name=peft_name) for name, peft_name in record.names.items()]
    size_bytes = write_safetensors(
        to / "adapter_model.safetensors", sorted(saved, key=lambda tensor: tensor.name)
    )
    flush_directory(to)
    return size_bytes


def merged_tensors(record: AdapterRecord, tensors: Tensors, exact: Tensors) -> list[StreamedTensor]:
    """Return the plain model's tensors, with the adapters merged into them.

    `tensors` are the run's in the dtype that is wanted, `exact` the same in float32, by name.
    Merged weights come by blocks of rows. Raises ConfigError without PEFT, or for a kind of layer
    whose merge is left to it.
    """
    from swaptrain.models.adapters.merge import check_mergeable

    check_mergeable(list(record.merges))
    merges = {merge.weight: merge for merge in record.merges}
    found = []
    for name, tensor in tensors.items():
        plain = record.plain.get(name, name)
        if plain is None:
            continue
        if name in merges:
            pieces = _merged(merges[name], record, tensor, exact)
            found.append(replace(tensor, name=plain, pieces=pieces))
        else:
            found.append(replace(tensor, name=plain))
    return found


def _merged(
    merge: MergeRecord, record: AdapterRecord, tensor: StreamedTensor, exact: Tensors
) -> Iterator[NDArray[Any]]:
    import torch

    from swaptrain.models.adapters.merge import merged_rows

    def value(name: str) -> torch.Tensor:
        whole = np.concatenate(list(exact[name].pieces))
        return torch.from_numpy(whole).reshape(exact[name].shape)

    for piece in merged_rows(merge, record.fields, tensor.shape, _rows(tensor), value):
        if tensor.dtype == "float16":  # it is merged in that dtype
            check_float16(piece, merge.weight)
        yield piece


def _rows(tensor: StreamedTensor) -> Callable[[int, int], Any]:
    """Return what gives the next rows of a tensor, each once and in order, as torch has them."""
    import torch

    width = int(np.prod(tensor.shape[1:]))
    pieces, rest = iter(tensor.pieces), list[NDArray[Any]]()

    def rows(first: int, count: int) -> torch.Tensor:
        while sum(map(len, rest)) < count * width:
            rest.append(next(pieces))
        flat = np.concatenate(rest)
        rest[:] = [flat[count * width :]]
        block = flat[: count * width].reshape(count, *tensor.shape[1:])
        if tensor.dtype == "bfloat16":
            return torch.from_numpy(block.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(block.copy())

    return rows
