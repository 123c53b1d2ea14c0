"""A LoraConfig of PEFT as the `lora` section of a config."""

from __future__ import annotations

import dataclasses
from typing import Any

from swaptrain.config.lora import LoraConfig
from swaptrain.errors import ConfigError
from swaptrain.models.adapters.lora import HEADS

__all__ = ["lora_tree"]

_FREE = (
    *("task_type", "peft_type", "inference_mode", "base_model_name_or_path", "revision"),
    *("auto_mapping", "peft_version", "runtime_config"),
)
"""What says nothing of the mathematics, or is written by PEFT itself."""
_HEADS = {"SEQ_CLS": HEADS, "TOKEN_CLS": HEADS, "QUESTION_ANS": ("qa_outputs",)}
"""What PEFT trains in full for a task, beside `modules_to_save`."""


def lora_tree(peft_config: Any) -> dict[str, Any]:
    """Return the section `lora`; raises one ConfigError that names each field that is not there."""
    import peft

    if type(peft_config) is not peft.LoraConfig:
        raise ConfigError(
            f"peft_config is {type(peft_config).__name__}: LoraConfig is what can be trained"
        )
    usual, known = peft.LoraConfig(), set(LoraConfig.field_names())
    changed = {
        field.name: getattr(peft_config, field.name)
        for field in dataclasses.fields(peft_config)
        if field.name not in _FREE
        and getattr(peft_config, field.name) != getattr(usual, field.name)
    }
    refused = [f"{name}={value!r}" for name, value in changed.items() if name not in known]
    if refused:
        raise ConfigError(f"peft_config: {'; '.join(refused)}: not supported, leave it out")
    tree = {
        name: sorted(value) if isinstance(value, set) else value
        for name in LoraConfig.field_names()
        if (value := getattr(peft_config, name)) is not None
    }
    task = str(getattr(peft_config.task_type, "value", peft_config.task_type))
    if heads := _HEADS.get(task):
        saved = tree.get("modules_to_save", [])
        saved = [saved] if isinstance(saved, str) else saved
        tree["modules_to_save"] = [*dict.fromkeys([*saved, *heads])]
    return tree
