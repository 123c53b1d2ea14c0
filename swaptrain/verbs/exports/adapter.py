"""The adapters of a run: as PEFT writes them, or merged into their base."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.format.root import AdapterRecord, MergeRecord
from swaptrain.store.read.safetensors import StreamedTensor, check_float16, write_safetensors
from swaptrain.verbs.exports.new_directory import new_directory

__all__ = ["adapter_of", "merged_tensors", "write_adapter"]

Tensors = Mapping[str, StreamedTensor]


def adapter_of(run: Path, record: AdapterRecord | None, option: str) -> AdapterRecord:
    """Return what is recorded of a run's adapters; raises ConfigError where it has none."""
    if record is None:
        raise ConfigError(f"{option}: {run} trains the model itself, and has no adapter")
    return record


def write_adapter(to: Path, record: AdapterRecord, tensors: Callable[[], Tensors]) -> int:
    """Write adapter_config.json and adapter_model.safetensors as PEFT does; return the bytes.

    `tensors` gives the run's, each to be read once: a tied one has several names in the file. The
    directory is there as a whole or not at all.
    """
    text = json.dumps(record.config, indent=2, sort_keys=True)
    left, saved = dict(tensors()), list[StreamedTensor]()
    for peft_name, name in record.names.items():
        source = left.pop(name, None) or tensors()[name]
        saved.append(replace(source, name=peft_name))
    with new_directory(to) as aside:
        write_aside(aside / "adapter_config.json", text.encode())
        return write_safetensors(
            aside / "adapter_model.safetensors", sorted(saved, key=lambda tensor: tensor.name)
        )


def merged_tensors(
    record: AdapterRecord, tensors: Callable[[str | None], Tensors], dtype: str | None
) -> list[StreamedTensor]:
    """Return the plain model's tensors in `dtype`, with the adapters merged into them.

    `tensors` gives the run's in a dtype, by name, each to be read once. A merged weight is in
    memory as a whole, one at a time. Where adapters change a tied weight under one of its names,
    each of these names has a tensor of its own. Raises ConfigError without PEFT, or for a kind of
    layer whose merge is left to it.
    """
    from swaptrain.models.adapters.merge import check_mergeable

    check_mergeable(list(record.merges))
    named = {record.plain.get(name, name): tensor for name, tensor in tensors(dtype).items()}
    named |= {plain: tensors(dtype)[name] for plain, name in (record.untied or {}).items()}
    merges = {merge.weight: merge for merge in record.merges}
    exact = tensors("float32")
    found = []
    for plain, tensor in named.items():
        if plain is None:
            continue
        merge = merges.pop(plain, None)
        pieces = tensor.pieces if merge is None else _merged(merge, record, tensor, exact)
        found.append(replace(tensor, name=plain, pieces=pieces))
    if merges:
        raise DamagedStoreError(f"the run has no weight {min(merges)}, which an adapter changes")
    return found


def _merged(
    merge: MergeRecord, record: AdapterRecord, tensor: StreamedTensor, exact: Tensors
) -> Iterator[NDArray[Any]]:
    """Yield the merged weight once it is asked for, so that there is one at a time."""
    from swaptrain.models.adapters.merge import merged_weight
    from swaptrain.models.hub_names import whole_tensor

    weight = merged_weight(
        merge, record.fields, whole_tensor(tensor), lambda name: whole_tensor(exact[name])
    )
    if tensor.dtype == "float16":  # it is merged in that dtype
        check_float16(weight, merge.weight)
    yield weight
