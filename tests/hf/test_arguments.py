"""Each argument is carried out, without meaning here, or refused by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainingArguments, get_scheduler

import swaptrain.hf
from swaptrain.compute.learning_rate import Schedule, learning_rate
from swaptrain.errors import ConfigError
from swaptrain.hf.adapters import lora_tree
from swaptrain.hf.arguments import FREE, MAPPED, arguments_tree, check_arguments, frequency_of
from swaptrain.hf.order import EpochShape
from tests.hf.tiny import arguments, items, llama

SHAPE = EpochShape(20, 2, 2, False)


def test_no_argument_is_passed_over_in_silence(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(MAPPED) | set(FREE) <= names, "an argument that transformers does not have"
    assert not set(MAPPED) & set(FREE)
    for name in names - {*MAPPED, *FREE}:
        args = arguments(tmp_path, report_to="tensorboard")
        setattr(args, name, "something else")
        with pytest.raises(ConfigError, match=rf"an argument of args: {name}='something else': "):
            check_arguments(args, evaluates=True)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"fp16": True}, "fp16"),
        ({"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5}, "neftune|label_smoothing"),
        ({"optim": "adafactor"}, "optim=adafactor: choose one of adamw_torch"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type=inverse_sqrt: choose linear"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, "num_cycles"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}}, "power is 1"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"report_to": ["wandb", "tensorboard"]}, "choose tensorboard and trackio"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers=2: items are made in this process"),
        ({"resume_from_checkpoint": "out/checkpoint-3"}, "the same call goes on"),
        ({"eval_strategy": "epoch", "per_device_eval_batch_size": 4}, "set 2"),
        ({"max_steps": 0}, "no step is trained"),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
            | {"eval_strategy": "epoch", "save_strategy": "epoch"},
            "metric_for_best_model=accuracy.*|greater_is_better",
        ),
        ({"save_total_limit": 0}, None),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "accelerator_config"),
        ({"push_to_hub": True, "hub_model_id": "me/it"}, "push_to_hub=True: nothing is sent"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_the_way_out(
    tmp_path: Path, changed: dict[str, Any], names: str | None
) -> None:
    args = arguments(tmp_path, **changed)
    if names is None:
        check_arguments(args, evaluates=True)
        return
    with pytest.raises(ConfigError, match=names) as found:
        check_arguments(args, evaluates=True)
    assert "\n" not in str(found.value)


def test_all_that_is_refused_is_in_one_line(tmp_path: Path) -> None:
    args = arguments(tmp_path, fp16=True, optim="lion_32bit", torch_compile=True)
    with pytest.raises(ConfigError, match=r"4 arguments of args: .*fp16=.*torch_compile=.*optim="):
        check_arguments(args, evaluates=False)


@pytest.mark.parametrize(
    ("changed", "formula"),
    [
        ({"lr_scheduler_type": "linear"}, True),
        ({"lr_scheduler_type": "linear", "warmup_steps": 0}, True),
        ({"lr_scheduler_type": "linear", "warmup_steps": 0.3}, True),
        ({"lr_scheduler_type": "cosine"}, True),
        ({"lr_scheduler_type": "constant"}, True),
        ({"lr_scheduler_type": "constant_with_warmup"}, True),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
            True,
        ),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4}}, False),
    ],
)
def test_the_rates_are_those_of_the_scheduler_of_transformers(
    tmp_path: Path, changed: dict[str, Any], formula: bool
) -> None:
    """To the last bit, but for the polynomial, whose formula is written in another way."""
    args = arguments(tmp_path, **changed)
    last = 17
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(last),
        num_training_steps=last,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    tree = arguments_tree(args, SHAPE, last)["optimizer"]
    for step in range(1, last + 1):
        ours = learning_rate(step, lr=tree["lr"], schedule=Schedule(**tree["schedule"]))
        theirs = scheduler.get_last_lr()[0]
        assert ours == (theirs if formula else pytest.approx(theirs, rel=1e-12))
        optimizer.step()
        scheduler.step()


@dataclasses.dataclass
class LikeSFTConfig(TrainingArguments):
    """The fields by which trl's SFTConfig is known, without trl."""

    dataset_text_field: str = "text"
    max_length: int | None = 1024
    packing: bool = False


def test_what_trl_would_make_of_the_items_is_refused(tmp_path: Path) -> None:
    def refused(text: str, data: Any, **changed: Any) -> None:
        args = LikeSFTConfig(output_dir=str(tmp_path / "out"), use_cpu=True, **changed)
        with pytest.raises(ConfigError, match=text):
            swaptrain.hf.train(llama(), args, data)

    refused("packing=True: items are taken as they are", items(2), packing=True)
    refused("max_length=8: items have 12 tokens", items(2), max_length=8)
    refused("no input_ids and no labels, which SFTTrainer would make", [{"text": "a"}])


def test_parts_of_all_steps_and_epochs_become_steps() -> None:
    assert frequency_of("steps", 0.25, SHAPE, 18).every == 5
    assert frequency_of("epoch", 500, SHAPE, 18).every == SHAPE.steps == 5
    assert frequency_of("no", 3, SHAPE, 18).strategy == "no"


def test_adapters_are_those_of_peft_or_refused_by_field() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    tree = lora_tree(config)
    assert (tree["r"], tree["target_modules"]) == (4, ["q_proj"])
    assert tree.get("modules_to_save") is None
    with pytest.raises(ConfigError, match=r"peft_config: target_parameters=.* not supported"):
        lora_tree(peft.LoraConfig(target_parameters=["experts.gate"]))
    with pytest.raises(ConfigError, match="peft_config is IA3Config"):
        lora_tree(peft.IA3Config())


@pytest.mark.parametrize(
    ("task", "heads"),
    [("SEQ_CLS", ["classifier", "score"]), ("TOKEN_CLS", ["classifier", "score"]),
     ("QUESTION_ANS", ["qa_outputs"])],
)  # fmt: skip
def test_what_peft_trains_in_full_for_a_task_is_trained(task: str, heads: list[str]) -> None:
    config = peft.LoraConfig(target_modules=["query"], task_type=task, modules_to_save=["pooler"])
    assert lora_tree(config)["modules_to_save"] == ["pooler", *heads]
    assert lora_tree(peft.LoraConfig(task_type=peft.TaskType[task]))["modules_to_save"] == heads


class Endless(IterableDataset[Any]):
    """Items without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_what_is_no_input_of_a_trainer_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    to = tmp_path / "out"
    data = items(4)

    def refused(text: str, *given: Any, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            swaptrain.hf.train(*given, **keys)
        assert not to.exists()

    args = arguments(to)
    refused("args is dict", llama(), {}, data)
    refused("callbacks: the rows", llama(), args, data, callbacks=[1])
    refused("train_dataset is Endless", llama(), args, Endless())
    refused("train_dataset is dict", llama(), args, {"a": data})
    refused("model is Linear", torch.nn.Linear(2, 2), args, data)
    refused("has no config.json", tmp_path / "nowhere", args, data)
    refused("weights of torch.float16", llama().half(), args, data)
    refused("weights of torch.bfloat16", llama().bfloat16(), args, data)
    refused("memory.host: the size 4 has no unit", llama(), args, data, memory=4)
    refused("data.micro_batch is said", llama(), args, data, data={"micro_batch": 3})
    refused("unknown key", llama(), args, data, store={"chunks": "1MiB"})
    refused("unknown key", llama(), args, data, colour="red")
    refused("eval_strategy=steps: there is no", llama(), arguments(to, eval_strategy="steps"), data)


def test_output_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ConfigError, match="has checkpoint-3 in it, and no run of swaptrain"):
        swaptrain.hf.train(llama(), arguments(tmp_path), items(4))
