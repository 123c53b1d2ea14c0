"""Which tool a file was written for, by the keys that only one of them has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError

__all__ = ["TOOLS", "recognised"]

TOOLS = ("axolotl", "llamafactory", "trl")
_OWN_KEYS = {
    "axolotl": (
        *("base_model", "micro_batch_size", "sequence_len", "num_epochs", "adapter", "optimizer"),
        *("lora_target_linear", "sample_packing", "val_set_size", "evals_per_epoch"),
        *("saves_per_epoch", "lr_scheduler", "datasets", "train_on_inputs", "wandb_project"),
        *("pretraining_dataset", "dataset_prepared_path", "special_tokens", "tokenizer_type"),
    ),
    "llamafactory": (
        *("stage", "finetuning_type", "template", "cutoff_len", "dataset", "dataset_dir"),
        *("lora_rank", "lora_target", "quantization_bit", "quantization_method", "val_size"),
        *("max_samples", "preprocessing_num_workers", "plot_loss", "overwrite_cache"),
        *("additional_target", "neat_packing", "pure_bf16", "train_on_prompt", "flash_attn"),
    ),
    "trl": (
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
        *("use_peft", "max_length", "max_seq_length", "dataset_text_field", "packing_strategy"),
        *("assistant_only_loss", "completion_only_loss", "chat_template_path", "eval_packing"),
        *("lora_target_modules", "dataset_num_proc", "test_split_size", "bnb_4bit_quant_type"),
    ),
}
_TRAINER = (
    *("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "optim"),
    *("per_device_eval_batch_size", "model_name_or_path", "eval_strategy", "output_dir"),
)
"""Keys of the Trainer, which LLaMA-Factory and TRL share: a file of them alone is read as TRL's."""
_SECOND_VERSION = ("train_dataset", "dist_config", "peft_config", "kernel_config", "model_class")


def recognised(values: Mapping[str, Any], source: str) -> str:
    """Return the tool, one of TOOLS; raises ConfigError where no keys or those of several fit."""
    sections = {name for name in Config.model_fields if isinstance(values.get(name), Mapping)}
    if len(sections & {"model", "data", "train", "run"}) >= 2:
        raise ConfigError(f"{source}: it is a config of swaptrain: give it with --config")
    if isinstance(values.get("model"), str) and any(name in values for name in _SECOND_VERSION):
        raise ConfigError(
            f"{source}: it is of LLaMA-Factory's new interface (model, train_dataset), which is "
            "not read: write it with the keys of llamafactory-cli train, such as model_name_or_path"
        )
    counts = {tool: sum(name in values for name in names) for tool, names in _OWN_KEYS.items()}
    best = max(counts, key=lambda tool: counts[tool])
    if counts[best] and list(counts.values()).count(counts[best]) == 1:
        return best
    if not counts[best] and sum(name in values for name in _TRAINER) >= 2:
        return "trl"
    found = ", ".join(list(values)[:6]) or "none"
    raise ConfigError(
        f"{source}: which tool wrote it does not show in its keys ({found}): say it with --from "
        f"{', '.join(TOOLS[:-1])} or {TOOLS[-1]}"
    )
