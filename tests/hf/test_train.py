"""What swaptrain.hf.train leaves is what a real Trainer leaves, to the bit where it is promised."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerState, set_seed
from transformers.trainer_utils import get_last_checkpoint

import swaptrain.hf
from swaptrain.errors import ConfigError, RunError
from swaptrain.hf import output
from tests.hf.tiny import Noted, arguments, items, llama
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits

pytestmark = pytest.mark.trains

SMALL: dict[str, Any] = {
    "memory": {"host": "256MiB", "segment": "64KiB"},
    "train": {"threads": 1},
    "store": {"commit": {"unit": "segment", "lag": 1}},
}


def plain(to: Path, data: Any, held_out: Any = None, **changed: Any) -> Trainer:
    """Train with transformers' Trainer, and save as a script of transformers does."""
    torch.set_num_threads(1)
    trainer = Trainer(llama(), arguments(to, **changed), train_dataset=data, eval_dataset=held_out)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return trainer


def state(directory: Path) -> TrainerState:
    """Return what transformers reads of a trainer_state.json."""
    return TrainerState.load_from_json(str(directory / "trainer_state.json"))


def weights(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a model's directory."""
    return load_file(directory / "model.safetensors")


ACCUMULATED = {"gradient_accumulation_steps": 2}
CASES = [
    ({**ACCUMULATED, "ragged": True}),
    ({}),
    ({"train_sampling_strategy": "sequential"}),
    ({**ACCUMULATED, "train_sampling_strategy": "sequential"}),
    ({"gradient_accumulation_steps": 3, "max_grad_norm": 0.1, "ragged": True}),
    ({**ACCUMULATED, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine"}),
    ({**ACCUMULATED, "dataloader_drop_last": True, "num_train_epochs": 1.5}),
]


@pytest.mark.parametrize(
    "changed", proof_but(CASES, CASES[0], whole=[CASES[2], CASES[3], CASES[5]]), ids=str
)
def test_losses_and_weights_are_those_of_a_trainer(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Eleven items: the last batch of an epoch is smaller, and so may its last step be."""
    changed = dict(changed)
    data = items(11, ragged=changed.pop("ragged", False))
    plain(tmp_path / "a", data, **changed)
    args = arguments(tmp_path / "b", **changed)
    done = swaptrain.hf.train(llama(), args, data, **SMALL)
    assert_same_bits(weights(tmp_path / "b"), weights(tmp_path / "a"))
    theirs, ours = state(tmp_path / "a"), state(tmp_path / "b")
    assert done.step == ours.global_step == theirs.global_step
    assert len(ours.log_history) == len(theirs.log_history) == ours.global_step + 1
    for a, b in zip(theirs.log_history[:-1], ours.log_history[:-1], strict=True):
        same = ("step", "epoch", "grad_norm", "learning_rate")
        assert {k: a[k] for k in same} == {k: b[k] for k in same}
        # The Trainer adds the losses of a step in float32.
        exact = changed.get("gradient_accumulation_steps", 1) == 1
        assert b["loss"] == (a["loss"] if exact else pytest.approx(a["loss"], rel=3e-7))
    loss = theirs.log_history[-1]["train_loss"]
    assert ours.log_history[-1]["train_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.proof
def test_the_directory_is_read_as_that_of_a_trainer(tmp_path: Path) -> None:
    data, held_out = items(12), items(5)
    changed: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "num_train_epochs": 1,
        "max_steps": 7,
        "logging_steps": 3,
        "learning_rate": 0.05,
    }
    plain(tmp_path / "a", data, held_out, **changed)
    swaptrain.hf.train(llama(), arguments(tmp_path / "b", **changed), data, held_out, **SMALL)
    folders = [
        sorted(p.name for p in (tmp_path / side).glob("checkpoint-*")) for side in ("a", "b")
    ]
    assert folders[0] == folders[1]
    for name in ("", *folders[0]):
        assert_same_bits(weights(tmp_path / "b" / name), weights(tmp_path / "a" / name))
        a, b = state(tmp_path / "a" / name), state(tmp_path / "b" / name)
        assert (a.global_step, a.epoch, a.max_steps) == (b.global_step, b.epoch, b.max_steps)
        assert (a.best_global_step, a.save_steps) == (b.best_global_step, b.save_steps)
        assert b.best_metric == pytest.approx(a.best_metric, rel=1e-6)
        assert Path(str(b.best_model_checkpoint)).name == Path(str(a.best_model_checkpoint)).name
        for theirs, ours in zip(a.log_history, b.log_history, strict=True):
            assert theirs["step"] == ours["step"]
            for key in {"loss", "eval_loss"} & theirs.keys():
                assert ours[key] == pytest.approx(theirs[key], rel=1e-6)
    last = get_last_checkpoint(str(tmp_path / "b"))
    assert last is not None and Path(last).name == folders[0][-1]
    model = AutoModelForCausalLM.from_pretrained(last)
    ids = data[0]["input_ids"][None]
    assert math.isfinite(model(input_ids=ids, labels=ids).loss.item())
    files = {path.name for path in (tmp_path / "b").rglob("*") if path.is_file()}
    assert not {name for name in files if name.endswith((".bin", ".pt", ".pth", ".partial"))}
    assert json.loads((Path(last) / "training_args.json").read_text())["save_steps"] == 2


class Failing(Noted):
    """Items of which one cannot be read, from a moment on."""

    left = 10**9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_the_same_call_goes_on_and_leaves_the_same(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    data = Failing(items(12))
    swaptrain.hf.train(llama(), arguments(tmp_path / "a", **changed), data, **SMALL)
    read = len(data.asked)
    data.left = read - 4  # in the last steps
    args = arguments(tmp_path / "b", **changed)
    with pytest.raises(RunError, match="the disk is gone"):
        swaptrain.hf.train(llama(), args, data, **SMALL)
    assert not (tmp_path / "b/trainer_state.json").exists()
    data.left = 10**9
    with pytest.raises(ConfigError, match="has other weights than the run"):
        swaptrain.hf.train(llama(seed=8), args, data, **SMALL)
    swaptrain.hf.train(tmp_path / "b/initial", args, data, **SMALL)
    assert_same_bits(weights(tmp_path / "b"), weights(tmp_path / "a"))
    assert {p.name for p in (tmp_path / "b").iterdir()} == {
        p.name for p in (tmp_path / "a").iterdir()
    }
    before = (tmp_path / "b/trainer_state.json").read_bytes()
    swaptrain.hf.train(llama(), args, data, **SMALL)  # nothing is left to do
    assert (tmp_path / "b/trainer_state.json").read_bytes() == before


def test_adapters_are_trained_and_saved_as_by_a_trainer(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    data = items(6)
    changed: dict[str, Any] = {"num_train_epochs": 1}
    model = llama()
    set_seed(42)
    with warnings.catch_warnings(action="ignore"):  # PEFT calls what transformers renames
        adapted = peft.get_peft_model(model, config)
    torch.set_num_threads(1)
    trainer = Trainer(adapted, arguments(tmp_path / "a", **changed), train_dataset=data)
    trainer.train()
    trainer.save_model()
    args = arguments(tmp_path / "b", **changed)
    swaptrain.hf.train(llama(), args, data, peft_config=config, **SMALL)
    theirs, ours = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("a", "b"))
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    with warnings.catch_warnings(action="ignore"):
        assert peft.PeftModel.from_pretrained(llama(), tmp_path / "b").active_adapter == "default"


def test_one_checkpoint_stays_and_each_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = output.export_weights

    def noted(run: Path, to: Path, *given: Any, **keys: Any) -> int:
        written.append(to.name)
        return write(run, to, *given, **keys)

    monkeypatch.setattr(output, "export_weights", noted)
    changed: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    args = arguments(tmp_path / "b", num_train_epochs=1, **changed)
    swaptrain.hf.train(llama(), args, items(8), **SMALL)
    assert written == [f".checkpoint-{step}" for step in (1, 2, 3, 4)]
    assert [p.name for p in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.proof
def test_bfloat16_is_near_the_autocast_of_a_trainer(tmp_path: Path) -> None:
    data = items(12)
    trainer = plain(tmp_path / "a", data, bf16=True)
    swaptrain.hf.train(llama(), arguments(tmp_path / "b", bf16=True), data, **SMALL)
    theirs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    ours = [row["loss"] for row in state(tmp_path / "b").log_history if "loss" in row]
    np.testing.assert_allclose(ours, theirs, rtol=0.02)


def test_a_model_that_cannot_weight_a_smaller_step_is_refused(tmp_path: Path) -> None:
    model = llama()
    model.accepts_loss_kwargs = False  # as classes of transformers say it
    with pytest.raises(ConfigError, match="set dataloader_drop_last"):
        swaptrain.hf.train(model, arguments(tmp_path / "b"), items(5), **SMALL)
    assert not (tmp_path / "b").exists()
