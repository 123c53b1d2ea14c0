"""`optimizer.groups`: rates, decay and optimizers by parameter, as plain PyTorch has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.live_store import look
from swaptrain.store.read.run_position import read_position
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_state, config_of, losses, reference, trained, weights
from tests.support.stores import CODED
from tests.whole.test_exactness import LLAMA
from tests.whole.test_resume import interrupted, same_end

pytestmark = pytest.mark.trains

BASE: dict[str, Any] = {
    "model": {"hf": LLAMA},
    "data": {"python": "tests.support.datasets:text"},
    "train": {"steps": 4},
    "memory": {"segment": "16KiB"},
}
REST = {"match": ["*norm*", "*embed*", "lm_head*"], "name": "adamw", "lr": 3e-3}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", "lr": 1e-2, "groups": [REST]},
    "muon-clipped": {"name": "muon", "lr": 1e-2, "clip_norm": 0.3, "groups": [REST]},
    "rates": {
        "name": "adamw",
        "lr": 1e-2,
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "groups": [
            {"match": ["*norm*"], "lr": 1e-1, "weight_decay": 0.3},  # of one dimension too
            {"match": ["*q_proj*", "*norm*"], "betas": [0.8, 0.9]},
            {"match": ["*embed*"], "name": "sgd", "momentum": 0.9, "lr": 1e-2, "weight_decay": 0.0},
        ],
    },
    "states": {
        "name": "adamw",
        "lr": 1e-2,
        "state": "8bit",
        "groups": [{"match": ["*embed*"], "state": "float32"}],
    },
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", proof_but([*OPTIMIZERS], "muon-clipped", "rates"))
def test_the_bits_are_those_of_plain_pytorch(tmp_path: Path, name: str, dtype: str) -> None:
    """Of one optimizer for each group; the first group that matches has a parameter."""
    model = {**BASE["model"], "dtype": dtype}
    config = config_of(tmp_path / "a", {**BASE, "model": model, "optimizer": OPTIMIZERS[name]})
    run = trained(config)
    plain = reference(config)
    assert losses(run) == plain.losses
    assert_same_state(weights(run), plain)


def test_lora_plus(tmp_path: Path) -> None:
    """B with another rate than A."""
    tree = {
        **BASE,
        "lora": {"r": 4, "target_modules": "all-linear"},
        "optimizer": {"lr": 1e-3, "groups": [{"match": ["*lora_B*"], "lr": 1.6e-2}]},
    }
    config = config_of(tmp_path / "a", tree)
    run = trained(config)
    plain = reference(config)
    assert losses(run) == plain.losses
    alone = config_of(tmp_path / "b", {**tree, "optimizer": {"lr": 1e-3}})
    assert reference(alone).losses != plain.losses


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"groups": [{"match": ["nothing*"]}]}, r"groups\.0\.match: 'nothing\*' matches no param"),
        ({"groups": [{"match": ["*"], "nam": 1}]}, r"groups\.0\.nam: AdamW has no such argument"),
        ({"groups": [{"match": ["*"], "lr": -1}]}, r"groups\.0\.lr: is -1"),
        ({"groups": [{"match": ["*"], "clip_norm": 1}]}, r"clip_norm is said of all parameters"),
        ({"groups": [{"match": ["*"], "learning_rate": 1}]}, "did you mean lr"),
        ({"groups": [{"lr": 1}]}, r"groups\.0\.match: missing"),
        ({"groups": {"a": 1}}, r"groups: found a mapping .* wanted a list"),
        (
            {"groups": [{"match": ["*"]}, {"match": ["model.norm*"], "lr": 1.0}]},
            r"groups\.1\.match: all that it matches belongs to groups before it",
        ),
        ({"groups": [{"match": ["*"], "betas": 3}]}, r"optimizer\.groups\.0"),
        ({"name": "muon"}, r"Muon only supports 2D .* by optimizer\.groups"),
        ({"name": "Prodigy"}, "Prodigy cannot be used: it keeps numbers for all parameters"),
        ({"name": "AdamWScheduleFree"}, "cannot be used: it keeps numbers for all parameters"),
        (
            {"groups": [{"match": ["*"], "name": "adafactor", "state": "8bit"}]},
            r"groups\.0\.state: 8bit .* Adafactor does not",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(tmp_path: Path, optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trained(config_of(tmp_path / "a", {**BASE, "optimizer": optimizer}))
    assert not (tmp_path / "a").exists()


def test_rates_of_groups_may_change_and_nothing_else(tmp_path: Path) -> None:
    """With --accept-change, as those of the section."""
    config = config_of(tmp_path / "a", {**BASE, "optimizer": OPTIMIZERS["muon"]})
    trained(config)

    def changed(**group: Any) -> Any:
        optimizer = {**OPTIMIZERS["muon"], "groups": [{**REST, **group}]}
        tree = {**BASE, "optimizer": optimizer, "train": {"steps": 5}}
        return config_of(tmp_path / "a", tree)

    with pytest.raises(ConfigError, match=r"optimizer\.groups\.0\.lr: 0\.003 -> 0\.001"):
        trained(changed(lr=1e-3))
    trained(changed(lr=1e-3), accept_change=True)
    with pytest.raises(ConfigError, match="these keys cannot change"):
        trained(changed(name="sgd"), accept_change=True)


@pytest.mark.parametrize("lag", proof_but([1, 2], 2))
def test_a_rate_of_a_group_changes_behind_the_updates_that_pend(tmp_path: Path, lag: int) -> None:
    """Coded state, clipped gradients: what pends of the old step is updated at the old rate."""
    optimizer = {"name": "adamw", "lr": 1e-2, "clip_norm": 0.3, "state": "8bit"}

    def job(to: str, lr: float, steps: int) -> Config:
        groups = [{"match": ["down*"], "lr": lr}]
        tree = {
            **CODED,
            "optimizer": {**optimizer, "groups": groups},
            "train": {"steps": steps},
            "store": {"commit": {"lag": lag}},
        }
        return config_of(tmp_path / to, tree)

    trained(job("whole", 3e-3, 2))
    trained(job("whole", 1e-3, 4), accept_change=True)
    segments = len(list((tmp_path / "whole" / "store" / "segments").glob("0*")))
    interrupted(job("run", 3e-3, 4), segments + 3)  # in the updates of step 2
    live = look(tmp_path / "run")
    assert live is not None
    position = read_position(RunPaths(live.run_dir), live.root, live.records)
    assert position.done == 2 and len(position.pending) == segments - 2
    with pytest.raises(ConfigError, match=r"optimizer\.groups\.0\.lr: 0\.003 -> 0\.001"):
        trained(job("run", 1e-3, 4))
    trained(job("run", 1e-3, 4), accept_change=True)
    same_end(tmp_path / "run", tmp_path / "whole")
    assert losses(tmp_path / "run")[3] != losses(trained(job("old", 3e-3, 4)))[3]
