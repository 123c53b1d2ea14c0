"""LLaMA-Factory's keys, defaults and its list of datasets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swaptrain.config.paths import written_path
from swaptrain.migrate.draft import Draft
from swaptrain.migrate.files import add_files, found_files
from swaptrain.migrate.given import ONE_ANSWER
from swaptrain.migrate.lora import AdapterDefaults, add_adapter, add_base
from swaptrain.migrate.trainer import ToolNames, add_dtype, add_evaluation, add_training
from swaptrain.strict_json import read_json
from swaptrain.units import MIB

__all__ = ["add_llamafactory"]

_NAMES = ToolNames(
    micro_batch="per_device_train_batch_size",
    micro_batch_default=8,
    epochs="num_train_epochs",
    epochs_default=3.0,
    optimizer="optim",
    scheduler="lr_scheduler_type",
    scheduler_default="linear",
    lr_default=5e-5,
)
_ADAPTER = AdapterDefaults(8, None, 0.0, "lora_rank")
_LIST = "dataset_info.json"
_MOST_BYTES = 16 * MIB
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
"""By formatting, the columns that are read here under the same name."""


def add_llamafactory(draft: Draft) -> None:
    """Set all that LLaMA-Factory's file says; raises ConfigError."""
    given = draft.given
    stage = given.text("stage") or "sft"
    if stage not in ("sft", "pt"):
        raise given.refusal("stage", ONE_ANSWER)
    model = given.text("model_name_or_path")
    if model is not None:
        draft.set("model.hf", written_path(model), "model_name_or_path")
    add_dtype(draft, default="bfloat16")
    if given.flag("pure_bf16"):
        draft.set("model.dtype", "bfloat16", "pure_bf16, but with float32 masters")
    if given.flag("resize_vocab"):
        draft.set("model.resize_to_tokenizer", True, "resize_vocab")
    _add_adapter(draft)
    _add_data(draft, stage, model)
    steps = add_training(draft, _NAMES)
    add_evaluation(draft, steps, default_every=500)


def _add_adapter(draft: Draft) -> None:
    given = draft.given
    kind = given.text("finetuning_type") or "lora"
    if kind in ("freeze", "oft"):
        raise given.refusal(
            "finetuning_type",
            "give lora or full; train.freeze then names parameters of a full training that stay",
        )
    add_base(draft, nested=True)
    if kind != "lora":
        return
    started = given.texts("adapter_name_or_path")
    if started and not given.flag("create_new_adapter"):
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target"):
            given.take(key)
        draft.set(
            "lora.from",
            written_path(started[0]),
            "adapter_name_or_path, which says r, alpha and targets",
        )
        if len(started) > 1:
            draft.remark("adapter_name_or_path", started, "merge all but the last into the base")
        return
    targets = given.texts("lora_target") or ["all"]
    add_adapter(
        draft,
        _ADAPTER,
        "all-linear" if "all" in targets else targets,
        given.texts("additional_target"),
        ("lora_target", "additional_target"),
    )


def _add_data(draft: Draft, stage: str, tokenizer: str | None) -> None:
    given = draft.given
    folder, names = given.text("dataset_dir") or "data", given.texts("dataset")
    files = [file for name in names for file in _files(draft, folder, name, stage)]
    if files:
        add_files(draft, "data", files)
    if tokenizer is not None:
        draft.set("data.tokenizer", written_path(tokenizer), "model_name_or_path")
    length = given.count("cutoff_len")
    if length is None:
        draft.default("data.sequence_length", 2048)
    else:
        draft.set("data.sequence_length", length, "cutoff_len")
    part, evaluated = given.number("val_size"), given.texts("eval_dataset")
    if draft.config.get("data.chat"):
        _add_rows(draft, stage)
    if evaluated:
        found = [file for name in evaluated for file in _files(draft, folder, name, stage)]
        add_files(draft, "eval", found)
    elif part is not None and part >= 1:
        draft.remark("val_size", round(part), "data.held_out is a part of the rows, below 1")
    elif part and draft.config.get("data.chat"):
        draft.set("data.held_out", part, "val_size")
    elif part:
        draft.remark("val_size", part, "of text files: name others in eval.text instead")
    if given.flag("disable_shuffling"):
        draft.set("data.shuffle", False, "disable_shuffling")


def _add_rows(draft: Draft, stage: str) -> None:
    given = draft.given
    packs, neat = given.flag("packing"), given.flag("neat_packing")
    if packs is None and not neat:
        draft.default("data.packing", stage == "pt")
    else:
        draft.set("data.packing", bool(packs or neat), "neat_packing" if neat else "packing")
    if (packs and not neat) or (stage == "pt" and packs is not False):
        draft.say("packing: rows of one sequence do not attend to each other here (neat_packing)")
    if given.flag("train_on_prompt"):
        draft.set("data.train_on", "all", "train_on_prompt")
    if given.flag("mask_history"):
        draft.set("data.mask_history", True, "mask_history")
    template = given.text("template")
    if template is not None and stage == "sft":
        draft.remark(
            "template",
            template,
            "a template of LLaMA-Factory's own; here the tokenizer's is taken. Is it another one, "
            "give data.chat_template a file",
        )


def _files(draft: Draft, folder: str, name: str, stage: str) -> list[str]:
    """Return the files of a dataset by its entry in the list of datasets."""
    entry = _listed(folder).get(name)
    if not isinstance(entry, Mapping):
        file = f"{folder.rstrip('/')}/{name}.json"
        if not Path(file).exists():
            draft.remark(
                "dataset",
                name,
                f"it is not described in {folder}/{_LIST}: name its file instead of {file}",
            )
        return [written_path(file)]
    _remark_entry(draft, name, entry, stage)
    where = entry.get("file_name")
    if isinstance(where, str):
        return found_files(draft, os.path.join(folder, where))
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url") or entry.get("script_url") or name
    subset = entry.get("subset")
    split = entry.get("split")
    return found_files(draft, str(hub), name=subset, split=split)


def _listed(folder: str) -> dict[str, Any]:
    """Return the list of datasets of a folder; an empty one where it cannot be read."""
    try:
        found = read_json(Path(folder) / _LIST, _MOST_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remark_entry(draft: Draft, name: str, entry: Mapping[str, Any], stage: str) -> None:
    formatting = entry.get("formatting") or "alpaca"
    given = entry.get("columns")
    columns = given if isinstance(given, Mapping) else {}
    tags = entry.get("tags")
    if entry.get("ranking"):
        draft.remark("dataset", name, ONE_ANSWER)
    if entry.get("num_samples"):
        draft.remark(name, {"num_samples": entry["num_samples"]}, "give a file of as many rows")
    if stage == "pt":
        if columns.get("prompt", "text") != "text":
            draft.remark(name, {"prompt": columns["prompt"]}, "rename that column to text")
        return
    same = _COLUMNS.get(str(formatting), {})
    readable = {**same, "system": "system", "tools": "tools"}
    if formatting == "sharegpt" and tags:
        readable["messages"] = "messages" if "role" in str(tags) else "conversations"
        draft.remark(name, {"tags": tags}, "messages have role and content, turns from and value")
    other = {key: column for key, column in columns.items() if readable.get(key) != column}
    if other:
        wanted = {key: readable[key] for key in other if key in readable}
        advice = f"rename to {wanted}" if wanted else "no such column is read"
        draft.remark(name, {"columns": other}, advice)
    if formatting == "alpaca":
        draft.say(
            f"{name}: input follows instruction after an empty line here, not after a line's end; "
            "a column history is not read"
        )
