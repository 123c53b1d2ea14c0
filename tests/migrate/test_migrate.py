"""A file of Axolotl, LLaMA-Factory or TRL becomes the config that it means, or is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swaptrain.cli import main
from swaptrain.config.load import parse_config
from swaptrain.config.other_tools import OTHER_TOOLS
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.migrate import TOOLS, migrate

AXOLOTL = {
    "base_model": "model",
    "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
    "learning_rate": "2e-4",
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "sequence_len": 256,
    "output_dir": "./out",
}
FACTORY = {
    "model_name_or_path": "model",
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "mine",
    "cutoff_len": 128,
    "output_dir": "saves/a",
}
TRL = {"model_name_or_path": "model", "dataset_name": "rows.jsonl", "max_length": 64}

# What each means: keys of the tool, and what of the config they decide, by its dotted keys.
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        AXOLOTL,
        {
            "model.hf": "model", "model.dtype": "bfloat16", "data.chat": ("rows.jsonl",),
            "data.tokenizer": "model", "data.sequence_length": 256, "data.micro_batch": 2,
            "data.micro_batches": 4, "data.packing": False, "data.train_on": None,
            "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.0, "optimizer.clip_norm": 1.0,
            "optimizer.schedule.name": "cosine", "optimizer.schedule.warmup_ratio": 0.03,
            "train.epochs": 1.0, "train.seed": 42, "run.dir": Path("./out"), "lora": None,
            "eval": None, "store.keep": None,
        },
    ),
    (
        AXOLOTL
        | {
            "adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_alpha": 64,
            "lora_dropout": 0.05, "lora_target_linear": True, "peft_use_dora": True,
            "lora_modules_to_save": ["lm_head"], "sample_packing": True, "val_set_size": 0.05,
            "eval_steps": 20, "optimizer": "paged_adamw_32bit", "max_grad_norm": 0.3,
        },
        {
            "model.base": "nf4", "lora.r": 32, "lora.lora_alpha": 64.0, "lora.lora_dropout": 0.05,
            "lora.target_modules": "all-linear", "lora.use_dora": True, "lora.use_rslora": False,
            "lora.modules_to_save": ("lm_head",), "data.packing": True, "data.held_out": 0.05,
            "eval.every": 20, "eval.batches": "all", "optimizer.name": "adamw",
            "optimizer.clip_norm": 0.3,
        },
    ),
    (
        AXOLOTL
        | {
            "adapter": "lora", "load_in_8bit": True, "lora_r": 8, "lora_alpha": 16, "batch_size": 8,
            "lora_target_modules": ["q_proj", "v_proj"], "peft_use_rslora": True, "max_steps": 50,
            "gradient_accumulation_steps": None, "train_on_inputs": True, "saves_per_epoch": 1,
            "bf16": False, "fp16": False, "num_epochs": 4,
        },
        {
            "model.base": "int8", "model.dtype": "float32", "data.micro_batches": 4,
            "lora.target_modules": ("q_proj", "v_proj"), "lora.use_rslora": True,
            "train.steps": 50, "train.epochs": None, "data.train_on": "all",
            "optimizer.schedule.warmup_ratio": None, "optimizer.schedule.warmup_steps": 2,
        },
    ),
    (
        AXOLOTL
        | {
            "datasets": [{"path": "json", "data_files": ["a.json", "b.json"], "type": "alpaca"}],
            "test_datasets": [{"path": "held.jsonl", "type": "alpaca"}], "num_epochs": 3,
            "lr_scheduler": "constant_with_warmup", "warmup_steps": 10, "seed": 7,
            "save_steps": 100, "save_total_limit": 3, "adam_beta2": 0.95, "weight_decay": 0.1,
            "curriculum_sampling": True, "evals_per_epoch": 2, "early_stopping_patience": 3,
        },
        {
            "data.chat": ("a.json", "b.json"), "eval.chat": ("held.jsonl",), "eval.every": 100,
            "eval.patience": 3, "optimizer.schedule.name": "constant", "train.seed": 7,
            "optimizer.schedule.warmup_steps": 10, "optimizer.schedule.warmup_ratio": None,
            "store.keep.every": 100, "store.keep.last": 3, "optimizer.betas": [0.9, 0.95],
            "optimizer.weight_decay": 0.1, "data.shuffle": False,
        },
    ),
    (
        AXOLOTL
        | {
            "datasets": [{"path": "book.txt", "type": "completion"}], "cosine_min_lr_ratio": 0.1,
            "max_steps": 1000, "cosine_constant_lr_ratio": 0.8, "bf16": "auto",
        },
        {
            "data.text": ("book.txt",), "data.chat": None, "data.packing": None,
            "optimizer.schedule.min_lr_ratio": 0.1, "optimizer.schedule.decay_steps": 800,
            "optimizer.schedule.warmup_steps": 30,
        },
    ),
    (
        FACTORY,
        {
            "optimizer.lr": 5e-5, "optimizer.clip_norm": 1.0, "optimizer.weight_decay": 0.0,
            "optimizer.schedule.name": "linear", "train.epochs": 3.0, "data.micro_batch": 8,
            "data.micro_batches": 1, "data.packing": False, "data.chat": ("data/mine.json",),
            "lora": None, "train.seed": 42, "model.dtype": "bfloat16",
        },
    ),
    (
        FACTORY
        | {
            "finetuning_type": None, "lora_rank": 16, "quantization_bit": 4, "optim": "adamw_torch",
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "val_size": 0.1,
            "eval_strategy": "steps", "eval_steps": 500, "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1, "learning_rate": 1e-4, "mask_history": True, "bf16": True,
            "report_to": "tensorboard", "load_best_model_at_end": True,
        },
        {
            "train.report_to": ("tensorboard",), "store.keep.best": 1,
            "lora.r": 16, "lora.lora_alpha": 32.0, "lora.lora_dropout": 0.0, "model.base": "nf4",
            "lora.target_modules": "all-linear", "data.micro_batches": 8, "data.held_out": 0.1,
            "eval.every": 500, "optimizer.schedule.name": "cosine", "data.mask_history": True,
            "optimizer.schedule.warmup_ratio": 0.1, "optimizer.schedule.warmup_steps": 0,
        },
    ),
    (
        FACTORY
        | {
            "finetuning_type": "lora", "lora_target": "q_proj, v_proj", "use_rslora": True,
            "additional_target": "embed_tokens,lm_head", "neat_packing": True, "lora_alpha": 8,
            "train_on_prompt": True, "lr_scheduler_type": "polynomial", "learning_rate": 1e-5,
            "resize_vocab": True, "disable_shuffling": True, "pure_bf16": True,
        },
        {
            "lora.target_modules": ("q_proj", "v_proj"), "lora.lora_alpha": 8.0, "lora.r": 8,
            "lora.modules_to_save": ("embed_tokens", "lm_head"), "data.packing": True,
            "data.train_on": "all", "optimizer.schedule.name": "linear",
            "optimizer.schedule.min_lr_ratio": 1e-7 / 1e-5, "model.resize_to_tokenizer": True,
            "data.shuffle": False, "lora.use_rslora": True,
        },
    ),
    (
        FACTORY
        | {"finetuning_type": "lora", "adapter_name_or_path": "saves/b", "lora_rank": 4},
        {"lora.source": Path("saves/b")},
    ),
    (
        TRL,
        {
            "optimizer.lr": 2e-5, "optimizer.clip_norm": 1.0, "data.sequence_length": 64,
            "data.micro_batch": 8, "model.dtype": "bfloat16", "lora": None, "data.packing": False,
            "train.epochs": 3.0, "optimizer.schedule.name": "linear", "data.train_on": None,
        },
    ),
    (
        TRL
        | {
            "use_peft": True, "lora_target_modules": ["all-linear"], "packing": True,
            "load_in_4bit": True, "assistant_only_loss": True, "max_steps": 200,
            "warmup_steps": 0.05, "lr_scheduler_type": "warmup_stable_decay", "optim": "sgd",
            "lr_scheduler_kwargs": {"num_decay_steps": 50, "decay_type": "linear"},
            "max_grad_norm": 0.0, "test_split_size": 0.1, "eval_strategy": "steps",
        },
        {
            "lora.r": 16, "lora.lora_alpha": 32.0, "lora.lora_dropout": 0.05,
            "lora.target_modules": "all-linear", "data.train_on": "assistant", "train.steps": 200,
            "optimizer.schedule.warmup_ratio": 0.05, "optimizer.schedule.name": "wsd",
            "optimizer.schedule.decay_fraction": 0.25, "optimizer.name": "sgd",
            "optimizer.clip_norm": None, "model.base": "nf4", "data.held_out": 0.1,
            "eval.every": 10,
        },
    ),
    (
        TRL
        | {
            "dataset_name": None, "packing": True, "lr_scheduler_type": "constant",
            "datasets": [{"path": "json", "data_files": {"train": "a.jsonl"}}],
            "completion_only_loss": False, "fp16": True, "warmup_ratio": 0.1,
        },
        {
            "data.chat": ("a.jsonl",), "data.train_on": "all", "model.dtype": "float16",
            "optimizer.schedule.name": "constant", "optimizer.schedule.warmup_ratio": None,
        },
    ),
    (
        {
            "model_name_or_path": "model", "per_device_train_batch_size": 4, "optim": "adafactor",
            "dataset_name": "org/set", "num_train_epochs": 2, "eval_strategy": "epoch",
            "output_dir": "o", "lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-3,
            "lr_scheduler_kwargs": {"min_lr": 1e-4},
        },
        {
            "data.chat": ("data/org-set-train.jsonl",), "eval.chat": ("data/org-set-test.jsonl",),
            "optimizer.name": "adafactor", "optimizer.schedule.min_lr_ratio": 0.1,
            "data.micro_batch": 4, "train.epochs": 2.0,
        },
    ),
]  # fmt: skip


def written(folder: Path, keys: dict[str, Any]) -> Path:
    """Write another tool's file, which names `keys`."""
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def at(config: Config, key: str) -> Any:
    """Return the value of a dotted key; what an inner section that is null has is None."""
    value: Any = config
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value


@pytest.mark.parametrize("number", range(len(MEANINGS)))
def test_a_file_becomes_what_it_means(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each tool, with its defaults where a key is absent."""
    monkeypatch.chdir(tmp_path)
    keys, meaning = MEANINGS[number]
    text = migrate(written(tmp_path, keys))
    config = parse_config(text, source="ours")
    assert {key: at(config, key) for key in meaning} == meaning


def test_rows_say_what_trl_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of messages, and of a prompt and its completion the completion."""
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    for row, train_on in (({"messages": []}, "all"), ({"prompt": "a", "completion": "b"}, None)):
        rows.write_text(json.dumps(row) + "\n")
        config = parse_config(migrate(written(tmp_path, TRL)), source="ours")
        assert config.data.train_on == train_on


def test_datasets_of_llamafactory_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the list beside them: files here, names of the hub, and columns that have other names."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sets"
    folder.mkdir()
    listed = {
        "mine": {"file_name": "m.jsonl", "columns": {"prompt": "question", "response": "output"}},
        "theirs": {"hf_hub_url": "org/theirs", "subset": "en"},
    }
    (folder / "dataset_info.json").write_text(json.dumps(listed))
    keys = FACTORY | {"dataset_dir": "sets", "dataset": "mine,theirs"}
    text = migrate(written(tmp_path, keys))
    config = parse_config(text, source="ours")
    assert config.data.chat == ("sets/m.jsonl", "data/org-theirs-en-train.jsonl")
    assert "rename to {'prompt': 'instruction'}" in text
    assert "load_dataset('org/theirs', 'en', split='train')" in text


LOOSE = {
    "gradient_checkpointing": True, "flash_attention": True, "wandb_project": "p", "rope": 3,
    "neftune_noise_alpha": 5, "fsdp_config": {"a": 1}, "warmup_ratio": 0.1, "seed": 3,
    "max_steps": 10, "weight_decay": 0.1, "adam_beta1": 0.8, "bf16": True, "save_steps": 7,
    "logging_steps": 2, "report_to": "wandb", "lora_alpha": 4, "max_grad_norm": 2, "a\nb": "c\nd",
    "lr_scheduler_kwargs": {"x": 1}, "save_total_limit": 2, "eval_strategy": "epoch",
    "early_stopping_patience": 3, "load_in_8bit": True, "lora_target_parameters": ["a: #"],
}  # fmt: skip


@given(
    tool=st.sampled_from(TOOLS),
    chosen=st.sets(st.sampled_from(sorted(LOOSE))),
    unknown=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda key: key.strip() == key),
        st.text(min_size=1) | st.integers() | st.lists(st.text()).filter(bool),
        max_size=2,
    ),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_key_is_lost(
    tmp_path: Path, tool: str, chosen: set[str], unknown: dict[str, Any]
) -> None:
    """Each is in a comment: of what was made of it, or of why nothing was. The text loads."""
    base = {"axolotl": AXOLOTL, "llamafactory": FACTORY, "trl": TRL}[tool]
    keys = unknown | base | {key: LOOSE[key] for key in chosen}
    path = tmp_path / "theirs.yaml"
    path.write_text(json.dumps(keys))
    try:
        text = migrate(path, tool)
    except ConfigError as error:
        assert "\n" not in str(error).rstrip()
        return
    parse_config(text, source="ours")
    said = " ".join(" ".join(line.split("#", 1)[1:]) for line in text.splitlines())
    for key in chosen - {"a\nb"}:
        assert key in said, key


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
INNER = st.fixed_dictionaries(
    {"path": st.just("a.jsonl")},
    optional=dict.fromkeys(
        ("type", "split", "name", "data_files", "field_messages", "roles_to_train", "field"), VALUES
    ),
)


@given(
    tool=st.sampled_from(TOOLS),
    keys=st.dictionaries(st.sampled_from(sorted({*OTHER_TOOLS, *LOOSE, "optimizer"})), VALUES),
    arguments=st.dictionaries(st.sampled_from(["min_lr", "power", "num_decay_steps"]), VALUES),
    datasets=st.lists(INNER, max_size=2),
    name=st.sampled_from(["polynomial", "cosine_with_min_lr", "warmup_stable_decay"]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_value_is_it_is_read_or_refused(
    tmp_path: Path,
    tool: str,
    keys: dict[str, Any],
    arguments: dict[str, Any],
    datasets: list[dict[str, Any]],
    name: str,
) -> None:
    """No value of any key ends in another error."""
    base = {"axolotl": AXOLOTL, "llamafactory": FACTORY, "trl": TRL}[tool]
    schedule = {"lr_scheduler": name, "lr_scheduler_type": name, "lr_scheduler_kwargs": arguments}
    path = tmp_path / "theirs.yaml"
    path.write_text(json.dumps(base | schedule | {"datasets": datasets} | keys))
    with suppress(ConfigError):
        parse_config(migrate(path, tool), source="ours")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (AXOLOTL | {"rl": "dpo"}, "rl: dpo: training here is on one answer"),
        (AXOLOTL | {"adapter": "llama-adapter"}, "adapter: llama-adapter: adapters here are lora"),
        (AXOLOTL | {"base_model": None}, "it names no model: give base_model"),
        (AXOLOTL | {"datasets": "rows"}, "datasets: found the text 'rows'; wanted a list"),
        (AXOLOTL | {"learning_rate": None}, "learning_rate: null: Axolotl wants it"),
        (AXOLOTL | {"learning_rate": "fast"}, "learning_rate: found the text 'fast'; wanted a num"),
        (AXOLOTL | {"lora_r": 2.5, "adapter": "lora"}, "lora_r: found the number 2.5; wanted a wh"),
        (AXOLOTL | {"sequence_len": -4}, "as a config of swaptrain: line"),
        (
            AXOLOTL | {"datasets": [{"path": "a.txt"}, {"path": "b.json"}]},
            "it names plain text (a.txt) and rows",
        ),
        (FACTORY | {"stage": "kto"}, "stage: kto: training here is on one answer"),
        (FACTORY | {"finetuning_type": "freeze"}, "finetuning_type: freeze: give lora or full"),
        (FACTORY | {"dataset": None}, "it names no data: give dataset"),
        (TRL | {"packing": "often"}, "packing: found the text 'often'; wanted true or false"),
        (TRL | {"beta": 0.1}, "beta: 0.1: training here is on one answer"),
        ({"model": "a", "train_dataset": "b"}, "it is of LLaMA-Factory's new interface"),
        ({"model": {"hf": "a"}, "data": {"text": "a"}}, "it is a config of swaptrain: give it"),
        ({"answer": 42}, "which tool wrote it does not show in its keys (answer): say it with"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    keys: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the file and the key; nothing is printed to standard output."""
    assert main(["migrate", str(written(tmp_path, keys))]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_command_prints_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--from` decides where two tools share all keys of a file; a file that is none is refused."""
    path = written(tmp_path, {"model_name_or_path": "m", "dataset": "d", "max_length": 5})
    assert main(["migrate", str(path)]) == 2
    assert "say it with --from" in capsys.readouterr().err
    assert main(["migrate", str(path), "--from", "llamafactory"]) == 0
    assert parse_config(capsys.readouterr().out, source="ours").data.chat == ("data/d.json",)
    assert main(["migrate", str(path), "--from", "torchtune"]) == 2
    path.write_text("- a\n")
    assert main(["migrate", str(path)]) == 2
    assert main(["migrate", str(tmp_path / "none.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err
