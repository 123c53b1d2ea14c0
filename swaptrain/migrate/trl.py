"""TRL's keys and defaults for supervised fine-tuning, which are the Trainer's and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swaptrain.config.paths import written_path
from swaptrain.migrate.draft import Draft
from swaptrain.migrate.files import add_files, first_columns, found_files
from swaptrain.migrate.given import ONE_ANSWER
from swaptrain.migrate.lora import AdapterDefaults, add_adapter, add_base
from swaptrain.migrate.trainer import ToolNames, add_dtype, add_evaluation, add_training

__all__ = ["add_trl"]

_NAMES = ToolNames(
    micro_batch="per_device_train_batch_size",
    micro_batch_default=8,
    epochs="num_train_epochs",
    epochs_default=3.0,
    optimizer="optim",
    scheduler="lr_scheduler_type",
    scheduler_default="linear",
    lr_default=2e-5,
)
_ADAPTER = AdapterDefaults(16, 32.0, 0.05, "lora_r")
_PREFERENCES = ("beta", "loss_weights", "num_generations", "reward_model_path", "max_prompt_length")


def add_trl(draft: Draft) -> None:
    """Set all that TRL's file says; raises ConfigError."""
    given = draft.given
    for key in _PREFERENCES:
        if given.has(key):
            raise given.refusal(key, ONE_ANSWER)
    model = given.text("model_name_or_path")
    if model is not None:
        draft.set("model.hf", written_path(model), "model_name_or_path")
    add_dtype(draft, default="bfloat16")
    dtype = given.text("dtype", "torch_dtype")
    if dtype == "bfloat16" and draft.config.get("model.dtype") == "float32":
        draft.set("model.dtype", "bfloat16", f"dtype: {dtype}")
    add_base(draft, nested=False)
    if given.flag("use_peft"):
        targets = given.take("lora_target_modules")
        if isinstance(targets, list) and len(targets) == 1:
            targets = targets[0]
        names = ("lora_target_modules", "lora_modules_to_save")
        add_adapter(draft, _ADAPTER, targets, given.texts("lora_modules_to_save"), names)
        given.take("lora_task_type")
    _add_data(draft, model)
    steps = add_training(draft, _NAMES)
    add_evaluation(draft, steps, default_every=10)


def _add_data(draft: Draft, tokenizer: str | None) -> None:
    given = draft.given
    test = given.text("dataset_test_split") or "test"
    split = given.text("dataset_train_split") or "train"
    name, config = given.text("dataset_name"), given.text("dataset_config")
    strategy = str(given.take("eval_strategy", "evaluation_strategy") or "no").lower()
    evaluates, part = strategy not in ("no", "false"), given.number("test_split_size")
    files: list[str] = []
    for entry in _mixed(draft):
        files += _entry_files(draft, entry)
    if name is not None and not files:
        files = found_files(draft, name, name=config, split=split)
        if evaluates and not Path(name).suffix:
            add_files(draft, "eval", found_files(draft, name, name=config, split=test))
    if files:
        add_files(draft, "data", files)
    if tokenizer is not None:
        draft.set("data.tokenizer", written_path(tokenizer), "model_name_or_path")
    length = given.count("max_length", "max_seq_length")
    if length is None:
        draft.default("data.sequence_length", 1024)
    else:
        draft.set("data.sequence_length", length, "max_length")
    if draft.config.get("data.chat"):
        _add_rows(draft, files)
        if part and part < 1:
            draft.set("data.held_out", part, "test_split_size")


def _add_rows(draft: Draft, files: list[str]) -> None:
    given = draft.given
    packs = given.flag("packing")
    draft.set("data.packing", bool(packs), "packing" if packs is not None else "default of TRL")
    strategy = given.text("packing_strategy") or "bfd"
    if strategy not in ("bfd", "ffd") and packs:
        draft.remark("packing_strategy", strategy, "rows are laid whole; what is too long is cut")
    _add_trained(draft, files)
    template = given.text("chat_template_path")
    if template is not None:
        file = Path(template) / "chat_template.jinja" if Path(template).is_dir() else Path(template)
        draft.set("data.chat_template", str(file), "chat_template_path")
    column = given.text("dataset_text_field") or "text"
    if column != "text":
        draft.remark("dataset_text_field", column, "rename that column to text")
    if given.text("truncation_mode") == "keep_end":
        draft.remark("truncation_mode", "keep_end", "the end of a row that is too long is cut")


def _add_trained(draft: Draft, files: list[str]) -> None:
    """Set what is trained: TRL trains all of a conversation, unless it is told otherwise."""
    given = draft.given
    assistant, completion = given.flag("assistant_only_loss"), given.flag("completion_only_loss")
    columns = first_columns(files)
    if assistant:
        draft.set("data.train_on", "assistant", "assistant_only_loss")
    elif completion:
        draft.set("data.train_on", "completion", "completion_only_loss")
    elif completion is False or columns & {"messages", "conversations"}:
        what = "completion_only_loss: false" if completion is False else "rows of messages"
        draft.set("data.train_on", "all", f"default of TRL for {what}")
    elif not columns:
        draft.say(
            "assistant_only_loss is not set: TRL then trains every token of messages; here the "
            "turns of the assistant, unless data.train_on is all"
        )


def _mixed(draft: Draft) -> list[dict[str, Any]]:
    found = draft.given.take("datasets")
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise draft.given.wrong("datasets", found, "a list of mappings with path")
    return found


def _entry_files(draft: Draft, entry: dict[str, Any]) -> list[str]:
    path = entry.get("path")
    if not isinstance(path, str):
        raise draft.given.wrong("datasets", entry, "a list of mappings with path")
    for key in ("columns", "fraction", "data_dir"):
        if entry.get(key):
            draft.remark(path, {key: entry[key]}, "no key: make it so in the files")
    return found_files(
        draft,
        path,
        files=entry.get("data_files"),
        name=entry.get("name"),
        split=entry.get("split"),
    )
