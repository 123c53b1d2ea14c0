"""Adapters merged into the weights of their base, by PEFT itself, a block of rows at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from swaptrain.errors import ConfigError
from swaptrain.models.adapters.lora import ADAPTER, inject
from swaptrain.models.quantization import to_numpy
from swaptrain.store.format.root import MergeRecord

__all__ = ["check_mergeable", "merge_records", "merged_rows", "plain_names"]

_BLOCK_ELEMENTS = 4 << 20
_NAME = "layer"


def merge_records(module: nn.Module) -> list[MergeRecord]:
    """Return what a merge needs to know of each adapter in a module, in the module's order."""
    from peft.tuners.lora import LoraLayer

    found = []
    for path, layer in module.named_modules():
        if not isinstance(layer, LoraLayer) or ADAPTER not in layer.r:
            continue
        kind, (a, b) = _kind(layer)
        dora = ADAPTER in layer.lora_magnitude_vector
        found.append(
            MergeRecord(
                weight=f"{path}.base_layer.weight",
                kind=kind,
                a=f"{path}.{a}",
                b=f"{path}.{b}",
                magnitude=f"{path}.lora_magnitude_vector.{ADAPTER}.weight" if dora else None,
                r=layer.r[ADAPTER],
                alpha=float(layer.lora_alpha[ADAPTER]),
            )
        )
    return found


def plain_names(module: nn.Module) -> dict[str, str | None]:
    """Return by the names of a module with adapters those of the merged one, where they differ.

    None for what a merge leaves out: the adapters, and the originals of modules that were trained
    in full.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    layers = {p: m for p, m in module.named_modules() if isinstance(m, LoraLayer)}
    wrappers = {p: m for p, m in module.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    found: dict[str, str | None] = {}
    for name in module.state_dict(keep_vars=True):
        for path in layers:
            if name.startswith(f"{path}.base_layer."):
                found[name] = f"{path}.{name.removeprefix(f'{path}.base_layer.')}"
            elif name.startswith(f"{path}."):
                found[name] = None
        for path in wrappers:
            trained = f"{path}.modules_to_save.{ADAPTER}."
            if name.startswith(trained):
                found[name] = f"{path}.{name.removeprefix(trained)}"
            elif name.startswith(f"{path}.original_module."):
                found[name] = None
    return found


def merged_rows(
    record: MergeRecord,
    fields: Mapping[str, Any],
    shape: tuple[int, ...],
    rows: Callable[[int, int], torch.Tensor],
    value: Callable[[str], torch.Tensor],
) -> Iterator[NDArray[Any]]:
    """Yield a merged weight in row-major order, flat, as PEFT's `merge` makes it.

    `rows(first, count)` gives rows of the base's weight [count, ...] in its dtype, `value` what the
    adapter consists of, in float32, by name. Only DoRA on a weight that is stored as [in, out]
    takes it as a whole, since it needs the norms of its columns.
    """
    a, b = value(record.a), value(record.b)
    magnitude = None if record.magnitude is None else value(record.magnitude)
    by_input = record.kind != "linear"
    count = max(1, _BLOCK_ELEMENTS // max(1, shape[1]))
    count = shape[0] if by_input and magnitude is not None else count
    for first in range(0, shape[0], count):
        block = rows(first, min(count, shape[0] - first))
        last = first + len(block)
        yield _merged(
            record,
            fields,
            block,
            a[:, first:last] if by_input else a,
            b if by_input else b[first:last],
            magnitude if magnitude is None or by_input else magnitude[first:last],
        )


def _merged(
    record: MergeRecord,
    fields: Mapping[str, Any],
    block: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor | None,
) -> NDArray[Any]:
    layer: Any = _layer(record.kind, block)
    holder = nn.ModuleDict({_NAME: layer})
    own = {"r": record.r, "lora_alpha": record.alpha, "target_modules": [_NAME]}
    kinds = {name: fields[name] for name in ("use_rslora", "use_dora")}
    with torch.random.fork_rng(devices=[]):
        inject(holder, {**own, **kinds})
    adapted: Any = holder[_NAME]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        if record.kind == "embedding":
            adapted.lora_embedding_A[ADAPTER].data = a
            adapted.lora_embedding_B[ADAPTER].data = b
        else:
            adapted.lora_A[ADAPTER].weight.data = a
            adapted.lora_B[ADAPTER].weight.data = b
        if magnitude is not None:
            adapted.lora_magnitude_vector[ADAPTER].weight.data = magnitude
        adapted.merge()
        return to_numpy(layer.weight.detach())


def _layer(kind: str, weight: torch.Tensor) -> Any:
    """Return a layer of a kind on a block of a weight."""
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        layer: Any
        if kind == "linear":
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        elif kind == "conv1d":
            layer = Conv1D(weight.shape[1], weight.shape[0])
        else:
            layer = nn.Embedding(*weight.shape)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if kind == "conv1d":
        layer.bias = None
    return layer


def _kind(layer: Any) -> tuple[str, tuple[str, str]]:
    from peft.tuners import lora
    from transformers.pytorch_utils import Conv1D

    base = layer.get_base_layer()
    if isinstance(layer, lora.Embedding):
        return "embedding", (f"lora_embedding_A.{ADAPTER}", f"lora_embedding_B.{ADAPTER}")
    names = (f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight")
    if isinstance(layer, lora.Linear):
        return ("conv1d" if isinstance(base, Conv1D) else "linear"), names
    return type(base).__name__.lower(), names


def check_mergeable(records: list[MergeRecord]) -> None:
    """Raise ConfigError for an adapter of a kind whose merge is left to PEFT."""
    other = next((r for r in records if r.kind not in ("linear", "conv1d", "embedding")), None)
    if other is not None:
        raise ConfigError(
            f"--merged: {other.weight} belongs to a layer of the kind {other.kind}, which is "
            "not merged here: write the adapter (--adapter DIR) and merge it with PEFT"
        )
