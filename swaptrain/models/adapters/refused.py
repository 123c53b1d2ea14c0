"""Adapters (LoRA and its like) in a directory of weights: refused by name, never passed over."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from swaptrain.errors import ConfigError

__all__ = ["refuse_adapter_tensors", "refuse_adapters"]

# PEFT's names, those of the library `adapters`, of MLX and of diffusers.
_FILES = (
    *("adapter_config.json", "adapter_model.*", "adapter_model-*", "pytorch_adapter.bin"),
    *("adapters.safetensors", "adapters.npz", "*lora*.safetensors", "*lora*.bin"),
)
_PARTS = (
    *("lora_", ".base_layer.", ".ia3_", ".hada_", ".lokr_", ".oft_", ".vera_lambda"),
    *("base_model.model.", ".modules_to_save.", "prompt_encoder."),
)
"""Parts of the names that PEFT gives to tensors, and no model of transformers does."""


def refuse_adapters(directory: Path) -> None:
    """Raise ConfigError where a directory holds the files of an adapter.

    As where transformers looks for one, folders in it are not looked into.
    """
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    found = [name for name in names if any(fnmatch(name.lower(), glob) for glob in _FILES)]
    if found:
        raise ConfigError(
            f"model.hf: {directory} holds an adapter ({', '.join(found)}), and without it the "
            "model would be another: move it to a directory of its own and name that in lora.from "
            "to go on with it, or merge it into the model's weights (merge_and_unload of peft, "
            "then save_pretrained)"
        )


def refuse_adapter_tensors(directory: Path, unused: Iterable[str]) -> None:
    """Raise ConfigError where tensors that the model has no place for are an adapter's."""
    found = [name for name in unused if any(part in name for part in _PARTS)]
    if found:
        raise ConfigError(
            f"model.hf: {directory} holds tensors of an adapter among the model's ({found[0]} and "
            f"{len(found) - 1} more), without which it would be another: merge them into the "
            "model's weights first (merge_and_unload of peft, then save_pretrained)"
        )
