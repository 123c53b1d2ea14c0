"""Adapters merged into the weights of their base, by PEFT itself, one weight at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from swaptrain.errors import ConfigError
from swaptrain.models.adapters.lora import ADAPTER, inject
from swaptrain.models.quantization import to_numpy
from swaptrain.store.format.root import MergeRecord

__all__ = ["check_mergeable", "merge_records", "merged_weight", "plain_names", "untied_names"]

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
                weight=f"{path}.weight",
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
    found = _merged_names(module)
    return {name: plain for name, plain in found.items() if plain != name}


def untied_names(module: nn.Module) -> dict[str, str] | None:
    """Return the further names of tied weights in the merged model, and what each is stored under.

    None where every weight that has several names is the same under all of them. Else an adapter,
    or training in full, changes it under one name alone, as a head that is tied to a table of
    embeddings: with the names apart the merged model computes what the trained one does.
    """
    names, state = _merged_names(module), module.state_dict(keep_vars=True)
    by_plain = {plain: name for name, plain in names.items() if plain is not None}
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    groups = [group for group in tied.values() if len(group) > 1]

    def value(name: str) -> tuple[int, int]:
        """Return what the merged model has under a name: which tensor, adapted by which layer."""
        path, original, rest = name.partition(".original_module.")
        if names[name] is None and original:
            name = by_plain[f"{path}.{rest}"]
        layer, adapted, _ = name.rpartition(".base_layer.")
        return id(state[name]), id(module.get_submodule(layer)) if adapted else 0

    if all(len({*map(value, group)}) == 1 for group in groups):
        return None
    stored = {names[name]: group[0] for group in groups for name in group[1:]}
    return {plain: name for plain, name in stored.items() if plain is not None}


def _merged_names(module: nn.Module) -> dict[str, str | None]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    every = dict(module.named_modules(remove_duplicate=False))  # of shared modules each path
    layers = [path for path, one in every.items() if isinstance(one, LoraLayer)]
    wrappers = [path for path, one in every.items() if isinstance(one, ModulesToSaveWrapper)]
    found: dict[str, str | None] = {}
    for name in module.state_dict(keep_vars=True):
        found[name] = name
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


def merged_weight(
    record: MergeRecord,
    fields: Mapping[str, Any],
    weight: torch.Tensor,
    value: Callable[[str], torch.Tensor],
) -> NDArray[Any]:
    """Return a merged weight, as PEFT's `merge` makes it of the base's `weight`, which may change.

    `value` gives what the adapter consists of, in float32, by name. The weight is merged as a
    whole: the product of a part of its rows may have other bits.
    """
    layer: Any = _layer(record.kind, weight)
    holder = nn.ModuleDict({_NAME: layer})
    own = {"r": record.r, "lora_alpha": record.alpha, "target_modules": [_NAME]}
    kinds = {name: fields[name] for name in ("use_rslora", "use_dora")}
    with torch.random.fork_rng(devices=[]):
        inject(holder, {**own, **kinds})
    adapted: Any = holder[_NAME]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        if record.kind == "embedding":
            adapted.lora_embedding_A[ADAPTER].data = value(record.a)
            adapted.lora_embedding_B[ADAPTER].data = value(record.b)
        else:
            adapted.lora_A[ADAPTER].weight.data = value(record.a)
            adapted.lora_B[ADAPTER].weight.data = value(record.b)
        if record.magnitude is not None:
            adapted.lora_magnitude_vector[ADAPTER].weight.data = value(record.magnitude)
        adapted.merge()
        return to_numpy(layer.weight.detach())


def _layer(kind: str, weight: torch.Tensor) -> Any:
    """Return a layer of a kind on a weight."""
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
