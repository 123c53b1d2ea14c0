"""Axolotl's keys, defaults and kinds of datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swaptrain.config.paths import written_path
from swaptrain.migrate.draft import Draft
from swaptrain.migrate.files import add_files, found_files
from swaptrain.migrate.given import ONE_ANSWER
from swaptrain.migrate.lora import AdapterDefaults, add_adapter, add_base
from swaptrain.migrate.trainer import ToolNames, add_dtype, add_evaluation, add_training

__all__ = ["add_axolotl"]

_NAMES = ToolNames(
    micro_batch="micro_batch_size",
    micro_batch_default=1,
    epochs="num_epochs",
    epochs_default=1.0,
    optimizer="optimizer",
    scheduler="lr_scheduler",
    scheduler_default="cosine",
    lr_default=None,
)
_ADAPTER = AdapterDefaults(None, None, 0.0, "lora_r", "peft_use_rslora", "peft_use_dora")
_READ_BY_ALL = ("path", "type", "split", "name", "data_files", "ds_type", "conversation")


def add_axolotl(draft: Draft) -> None:
    """Set all that Axolotl's file says; raises ConfigError."""
    given = draft.given
    if given.has("rl"):
        raise given.refusal("rl", ONE_ANSWER)
    for key in ("reward_model", "process_reward_model", "diffusion"):
        if given.take(key):
            raise given.refusal(key, "training here predicts the next token")
    model = given.text("base_model", "base_model_config")
    if model is not None:
        draft.set("model.hf", written_path(model), "base_model")
    add_dtype(draft, default="bfloat16")
    _add_adapter(draft)
    _add_data(draft, given.text("tokenizer_config") or model)
    steps = add_training(draft, _NAMES)
    _add_own_warmup(draft, steps)
    _add_floor(draft, steps)
    add_evaluation(draft, steps, default_every=None)


def _add_adapter(draft: Draft) -> None:
    given = draft.given
    kind = given.text("adapter")
    add_base(draft, nested=True)
    if kind is None:
        return
    if kind not in ("lora", "qlora"):
        raise given.refusal("adapter", "adapters here are lora's, on a base that may be quantized")
    started = given.text("lora_model_dir")
    if started is not None:
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            given.take(key)
        given.take("lora_target_linear", "lora_modules_to_save")
        draft.set(
            "lora.from",
            written_path(started),
            "lora_model_dir, which says r, alpha and targets itself",
        )
        return
    linear = given.flag("lora_target_linear")
    targets = None if linear else given.take("lora_target_modules")
    add_adapter(
        draft,
        _ADAPTER,
        "all-linear" if linear else targets,
        given.texts("lora_modules_to_save"),
        ("lora_target_linear" if linear else "lora_target_modules", "lora_modules_to_save"),
    )
    if given.count("lora_r") is None:
        draft.say("lora_r: Axolotl wants it; without it r is swaptrain's 8, and lora_alpha 8")
    for theirs, ours in (
        ("peft_layers_to_transform", "layers_to_transform"),
        ("peft_layers_pattern", "layers_pattern"),
        ("peft_init_lora_weights", "init_lora_weights"),
        ("lora_exclude_modules", "exclude_modules"),
        ("lora_rank_pattern", "rank_pattern"),
        ("lora_alpha_pattern", "alpha_pattern"),
    ):
        if given.has(theirs):
            draft.set(f"lora.{ours}", given.take(theirs), theirs)


def _add_data(draft: Draft, tokenizer: str | None) -> None:
    given = draft.given
    pretraining = given.take("pretraining_dataset")
    datasets = _datasets(draft, "datasets") or _as_list(pretraining)
    files = [file for entry in datasets for file in _files(draft, entry)]
    if files:
        add_files(draft, "data", files)
    if tokenizer is not None:
        draft.set("data.tokenizer", written_path(tokenizer), "base_model")
    length = given.count("sequence_len")
    if length is None:
        draft.default("data.sequence_length", 512)
    else:
        draft.set("data.sequence_length", length, "sequence_len")
    if draft.config.get("data.chat"):
        _add_rows(draft, datasets)
    part = given.number("val_set_size")
    tests = [f for entry in _datasets(draft, "test_datasets") for f in _files(draft, entry)]
    if tests:
        add_files(draft, "eval", tests)
    elif part is not None and part >= 1:
        draft.remark("val_set_size", round(part), "data.held_out is a part of the rows, below 1")
    elif part and not draft.config.get("data.chat"):
        draft.remark("val_set_size", part, "of text files: name others in eval.text instead")
    elif part:
        draft.set("data.held_out", part, "val_set_size")
    if given.flag("curriculum_sampling"):
        draft.set("data.shuffle", False, "curriculum_sampling")


def _add_rows(draft: Draft, datasets: list[dict[str, Any]]) -> None:
    given = draft.given
    packs = given.flag("sample_packing")
    draft.set("data.packing", bool(packs), "sample_packing" if packs is not None else "default")
    if given.flag("train_on_inputs"):
        draft.set("data.train_on", "all", "train_on_inputs")
    long = given.text("excess_length_strategy") or "drop"
    if long != "truncate":
        draft.remark("excess_length_strategy", long, "rows that are too long are cut and counted")
    template = given.text("chat_template")
    jinja = given.text("chat_template_jinja")
    for entry in datasets:
        template = entry.get("chat_template") or template
        jinja = entry.get("chat_template_jinja") or jinja
    if jinja is not None:
        draft.set("data.chat_template", jinja, "chat_template_jinja")
    elif template is not None and not str(template).startswith("tokenizer_default"):
        draft.remark(
            "chat_template",
            template,
            "a template of Axolotl's own; here the tokenizer's is taken. Is it another one, give "
            "data.chat_template a file",
        )


def _files(draft: Draft, entry: dict[str, Any]) -> list[str]:
    """Return the files of one of `datasets`; remarks what its rows are read as."""
    path = entry.get("path")
    if not isinstance(path, str):
        raise draft.given.wrong("datasets", entry, "a list of mappings with path")
    files = found_files(
        draft,
        path,
        files=entry.get("data_files"),
        name=entry.get("name"),
        split=entry.get("split"),
    )
    _remark_rows(draft, path, entry)
    return files


def _remark_rows(draft: Draft, path: str, entry: dict[str, Any]) -> None:
    kind = entry.get("type")
    word = str(kind).partition(".")[0]
    known = {*_READ_BY_ALL, "chat_template", "chat_template_jinja"}
    if word in ("chat_template", "messages", "sharegpt", "None"):
        known |= {"field_messages", "message_property_mappings", "roles", "roles_to_train"}
        known |= {"message_field_role", "message_field_content"}
        _remark_messages(draft, path, entry)
    elif word in ("completion", "pretrain"):
        known |= {"field", "text_column"}
        column = entry.get("field") or entry.get("text_column") or "text"
        if column != "text":
            draft.remark(path, f"field: {column}", "rename that column to text")
        draft.remark(
            path, f"type: {kind}", "a longer text is cut at data.sequence_length, not continued"
        )
    elif word == "input_output":
        draft.remark(
            path,
            "type: input_output",
            "segments are not read: write each row as input_ids and labels, or, with one answer, "
            "as prompt and completion",
        )
    elif word.startswith(("alpaca", "context_qa", "gpteacher", "reflection", "creative")):
        draft.remark(
            path,
            f"type: {kind}",
            "Axolotl writes the prompt's words around instruction and input; here the tokenizer's "
            "chat template does. For the same words write rows of prompt and completion",
        )
    else:
        draft.remark(
            path, {"type": kind}, "write each row with columns that docs/finetuning.md names"
        )
    for key in entry:
        if key not in known and entry[key] not in (None, "", False):
            draft.remark(path, {key: entry[key]}, "no key: make it so in the rows")


def _remark_messages(draft: Draft, path: str, entry: dict[str, Any]) -> None:
    found = entry.get("message_property_mappings")
    mapping = found if isinstance(found, Mapping) else {}
    role = mapping.get("role") or entry.get("message_field_role") or "role"
    content = mapping.get("content") or entry.get("message_field_content") or "content"
    column = entry.get("field_messages") or "messages"
    readable = [("messages", "role", "content"), ("conversations", "role", "content")]
    readable.append(("conversations", "from", "value"))
    if (column, role, content) not in readable and entry.get("type") is not None:
        draft.remark(
            path,
            f"{column}: [{role}, {content}]",
            "rename to messages with role and content, or conversations with from and value",
        )
    trained = entry.get("roles_to_train")
    if trained not in (None, ["assistant"], ["gpt"]):
        draft.remark(path, {"roles_to_train": trained}, "data.train_on: assistant, or all of a row")


def _datasets(draft: Draft, key: str) -> list[dict[str, Any]]:
    found = draft.given.take(key)
    if found is not None and not isinstance(found, list):
        raise draft.given.wrong(key, found, "a list of datasets, each with path")
    return _as_list(found)


def _as_list(found: Any) -> list[dict[str, Any]]:
    """Return datasets as mappings; a name alone is one with that path, of text."""
    entries = found if isinstance(found, list) else [] if found is None else [found]
    return [
        entry if isinstance(entry, dict) else {"path": entry, "type": "pretrain"}
        for entry in entries
    ]


def _add_own_warmup(draft: Draft, steps: int | None) -> None:
    """Set Axolotl's warmup where none is given: 3 % of the steps, at most 100, rounded down."""
    given = draft.given
    if given.has("warmup_steps") or given.has("warmup_ratio"):
        return
    if draft.config.get("optimizer.schedule.name") == "constant":
        return
    key = "optimizer.schedule.warmup"
    if steps is not None:
        count = min(int(0.03 * steps), 100)
        draft.default(f"{key}_steps", 2 if count == 1 else count)
    else:
        draft.set(f"{key}_ratio", 0.03, "default of Axolotl, which is 100 steps at most")


def _add_floor(draft: Draft, steps: int | None) -> None:
    """Set what a cosine of Axolotl's ends at, and when."""
    given = draft.given
    least, until = given.number("cosine_min_lr_ratio"), given.number("cosine_constant_lr_ratio")
    if least:
        draft.set("optimizer.schedule.min_lr_ratio", least, "cosine_min_lr_ratio")
    if until and steps:
        decay = max(1, int(until * steps))
        draft.set("optimizer.schedule.decay_steps", decay, "cosine_constant_lr_ratio")
    elif until:
        draft.remark(
            "cosine_constant_lr_ratio",
            until,
            "set optimizer.schedule.decay_steps to that part of all steps, which plan says",
        )
