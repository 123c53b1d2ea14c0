"""Epochs are steps, once the items are counted; 0 steps are the initial weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swaptrain.compute.learning_rate import Schedule, learning_rate
from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.config.train import TrainConfig
from swaptrain.data.batches import Batches
from swaptrain.errors import ConfigError
from swaptrain.verbs.plan import plan
from tests.support.datasets import tokens
from tests.support.runs import assert_same_bits, config_of, losses, rows, trained, weights

ITEMS = len(tokens())


def small(run_dir: Path, train: dict[str, Any], **sections: Any) -> Config:
    """Return the config of a small run with 6 items a step."""
    config = config_of(
        run_dir,
        {
            "model": {"python": "tests.support.models:gpt"},
            "data": {"python": "tests.support.datasets:tokens"},
            **sections,
        },
    )
    tree = config.train.model_copy(update={"steps": None, "epochs": None, **train})
    return config.model_copy(update={"train": tree})


@pytest.mark.trains
def test_epochs_are_so_many_steps(tmp_path: Path) -> None:
    """Rounded up, recorded, the schedule over all of them, and gone on with by more."""
    schedule = {"name": "cosine", "warmup_ratio": 0.25, "min_lr_ratio": 0.1}
    cosine = {"optimizer": {"schedule": schedule}}
    by_epochs = trained(small(tmp_path / "epochs", {"epochs": 1.3}, **cosine))
    steps = math.ceil(1.3 * ITEMS / 6)
    by_steps = trained(small(tmp_path / "steps", {"steps": steps}, **cosine))
    assert [row["lr"] for row in rows(by_epochs)] == [row["lr"] for row in rows(by_steps)]
    assert losses(by_epochs) == losses(by_steps)
    assert_same_bits(weights(by_epochs), weights(by_steps))
    assert [row["epoch"] for row in rows(by_epochs)] == [
        round(6 * step / ITEMS, 4) for step in range(1, steps + 1)
    ]
    recorded = load_config(by_epochs / "config.yaml")
    assert (recorded.train.steps, recorded.train.epochs) == (steps, None)
    more = small(tmp_path / "epochs", {"epochs": 2}, **cosine)
    plan(more)
    trained(more)
    assert len(losses(by_epochs)) == math.ceil(2 * ITEMS / 6)


@pytest.mark.trains
def test_no_step_leaves_the_initial_weights(tmp_path: Path) -> None:
    """A run of 0 steps is one that can be gone on with, to the same end."""
    cosine = {"optimizer": {"schedule": {"name": "cosine"}}}
    run_dir = trained(small(tmp_path / "run", {"steps": 0}, **cosine))
    assert not (run_dir / "metrics.jsonl").exists() or rows(run_dir) == []
    first = weights(run_dir)
    trained(small(tmp_path / "run", {"steps": 0}, **cosine))
    assert_same_bits(weights(run_dir), first)
    trained(small(tmp_path / "run", {"steps": 3}, **cosine))
    whole = trained(small(tmp_path / "whole", {"steps": 3}, **cosine))
    assert losses(run_dir) == losses(whole)
    assert_same_bits(weights(run_dir), weights(whole))


@pytest.mark.trains
def test_a_run_that_does_not_know_its_items_asks_for_steps(tmp_path: Path) -> None:
    """Begun by an earlier version, whose record of the data has no such number."""
    run_dir = trained(small(tmp_path / "run", {"steps": 1}))
    record = run_dir / "data" / "train.json"
    content = json.loads(record.read_text())
    del content["items"]
    record.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"train\.epochs: .* give train\.steps"):
        trained(small(tmp_path / "run", {"epochs": 2}))
    trained(small(tmp_path / "run", {"steps": 2}))


@pytest.mark.trains
def test_a_new_run_of_epochs_is_planned(tmp_path: Path) -> None:
    """Before its items are counted, with a schedule that needs the steps."""
    cosine = {"optimizer": {"schedule": {"name": "cosine", "warmup_ratio": 0.1}}}
    assert plan(small(tmp_path / "run", {"epochs": 2}, **cosine)).idle_steps is None


@pytest.mark.trains
def test_epochs_in_which_nothing_is_learnt_are_refused(tmp_path: Path) -> None:
    """As steps are: once the items are counted, before there is a store."""
    schedule = {"name": "linear", "decay_steps": 1}
    config = small(tmp_path / "run", {"epochs": 0.2}, optimizer={"schedule": schedule})
    with pytest.raises(ConfigError, match="learning rate 0"):
        trained(config)
    assert not (tmp_path / "run" / "store").exists()


def test_one_of_steps_and_epochs() -> None:
    """Neither both nor none."""
    with pytest.raises(ValidationError, match="give exactly one of steps, epochs"):
        TrainConfig(steps=1, epochs=1.0)
    with pytest.raises(ValidationError, match=r"give steps, such as train\.steps=100, or epochs"):
        TrainConfig()


def test_a_part_of_the_steps_warms_up() -> None:
    """Rounded up, as in transformers."""
    by_ratio = Schedule(name="linear", warmup_ratio=0.25, decay_steps=10)
    by_steps = Schedule(name="linear", warmup_steps=3, decay_steps=10)
    for step in range(1, 12):
        expected = learning_rate(step, lr=1.0, schedule=by_steps)
        assert learning_rate(step, lr=1.0, schedule=by_ratio) == expected


class Told:
    """A dataset whose items are the epoch that it was told."""

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"epoch": self.epoch, "index": index}


def test_a_dataset_is_told_the_epoch() -> None:
    """Whatever the order in which batches are asked for."""
    batches = Batches(
        Told(), name="told", digest="", seed=0, shuffle=True, micro_batch=3, micro_batches=2
    )
    for step in (3, 1, 2):
        for index in range(2):
            first = ((step - 1) * 2 + index) * 3
            found = batches.batch(step, index)["epoch"].tolist()
            assert found == [(first + i) // 4 for i in range(3)]
