"""Parameters that are not plain, dense, real and float: trained right, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from swaptrain.compute.update import UpdateRule
from swaptrain.config.schema import Config
from swaptrain.data import open_data
from swaptrain.errors import SwaptrainError
from tests.support.matrix import every, proof_but
from tests.support.parameters import HOLES, REFUSED, TRAINED, build
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    reference,
    trained,
    weights,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "momentum": {"name": "sgd", "momentum": 0.9},
    "adagrad": {"name": "adagrad"},
    "adafactor": {"name": "adafactor"},
    "clipped": {"name": "sgd", "clip_norm": 0.3},
}


def job(run_dir: Path, kind: str, dtype: str = "float32", **optimizer: Any) -> Config:
    tree = {
        "model": {
            "python": "tests.support.parameters:build",
            "kwargs": {"kind": kind},
            "dtype": dtype,
        },
        "data": {"python": "tests.support.parameters:data"},
        "optimizer": optimizer,
        "train": {"steps": 2},
    }
    return config_of(run_dir, tree)


def ordinary_losses(config: Config) -> list[float]:
    """Train in a loop of plain PyTorch with an optimizer that is not fused."""
    torch.manual_seed(config.train.seed)
    model = build(config.model.kwargs["kind"]).train()
    data = open_data(
        config.data, seed=0, run_dir=config.run.dir.with_name("ordinary"), model_vocabulary=None
    )
    chosen = config.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]},
        {
            "params": [p for p in model.parameters() if p.requires_grad and p.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[chosen.name]
    settings: Mapping[str, Any] = {"weight_decay": chosen.weight_decay, **chosen.arguments}
    optimizer = make(groups, lr=chosen.lr, foreach=False, **settings)
    found = []
    for step in range(1, config.train.steps + 1):
        total = 0.0
        for m in range(config.data.micro_batches):
            loss = model(**data.batch(step, m))
            (loss / config.data.micro_batches).backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append(total / config.data.micro_batches)
    return found


@pytest.mark.trains
@pytest.mark.parametrize("kind", every(4, HOLES))
def test_a_parameter_with_holes_trains_as_with_an_ordinary_optimizer(
    kind: str, tmp_path: Path
) -> None:
    """Torch's own fused optimizers step what lies in the holes; neither swaptrain nor its loop do.

    The ordinary ones differ from fused ones in the last digit.
    """
    config = job(tmp_path / "run", kind, name="sgd", momentum=0.9, lr=0.1)
    run_dir = trained(config)
    plain = reference(config)
    assert losses(run_dir) == plain.losses
    assert losses(run_dir) == pytest.approx(ordinary_losses(config), rel=1e-6)
    assert_same_bits(weights(run_dir), plain.parameters)


@pytest.mark.trains
@pytest.mark.parametrize("optimizer", proof_but(OPTIMIZERS, "adamw", "adafactor"))
def test_with_every_kind_of_optimizer(optimizer: str, tmp_path: Path) -> None:
    config = job(tmp_path / "run", "chunks", **OPTIMIZERS[optimizer])
    run_dir = trained(config)
    plain = reference(config)
    assert losses(run_dir) == plain.losses
    assert_same_bits(weights(run_dir), plain.parameters)


@pytest.mark.trains
@pytest.mark.parametrize("kind", proof_but(["chunks", "window"], "window"))
def test_in_bfloat16_the_copy_has_no_holes(kind: str, tmp_path: Path) -> None:
    config = job(tmp_path / "run", kind, "bfloat16")
    run_dir = trained(config)
    plain = reference(config)
    assert losses(run_dir) == plain.losses
    assert_same_bits(weights(run_dir), plain.parameters)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "adafactor", "rmsprop", "nadam"])
@pytest.mark.parametrize("updates_before", [0, 3])
def test_the_update_of_one_with_holes_is_that_of_its_copy(name: str, updates_before: int) -> None:
    """Bit for bit, and nothing that lies in the holes changes."""
    rule = UpdateRule(name=name, lr=0.1, weight_decay=None, arguments={})
    memory = torch.randn(6, 10)
    holed, beside = memory[:, 1::2], memory[:, ::2].clone()
    copy, gradient = holed.contiguous(), torch.randn(6, 5)
    shapes = rule.state_tensors((6, 5))
    states = [{key: torch.full(shape, 0.5) for key, shape in shapes.items()} for _ in range(2)]
    for parameter, state in zip((holed, copy), states, strict=True):
        rule.update(
            parameter, gradient.clone(), state, updates_before=updates_before, lr=0.1, decay=True
        )
    assert torch.equal(holed, copy)
    assert torch.equal(memory[:, ::2], beside)
    for key in shapes:
        assert torch.equal(states[0][key], states[1][key])


@pytest.mark.trains
@pytest.mark.parametrize("kind", every(4, TRAINED))
def test_what_else_is_unusual_trains_as_in_plain_pytorch(kind: str, tmp_path: Path) -> None:
    config = job(tmp_path / "run", kind)
    run_dir = trained(config)
    plain = reference(config)
    assert losses(run_dir) == plain.losses
    assert losses(run_dir) == pytest.approx(ordinary_losses(config), rel=1e-6)
    assert_same_bits(weights(run_dir), plain.parameters)


@pytest.mark.trains
def test_what_the_constructor_makes_in_bfloat16_has_a_float32_master(tmp_path: Path) -> None:
    config = job(tmp_path / "run", "bfloat16 in float32", "bfloat16")
    run_dir = trained(config)
    plain = reference(config)
    assert losses(run_dir) == plain.losses
    assert_same_bits(weights(run_dir), plain.parameters)
    assert plain.parameters["unusual.0"].dtype == torch.float32


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_right_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Before anything is written."""
    config = job(tmp_path / "run", kind)
    with pytest.raises(SwaptrainError) as refusal:
        trained(config)
    assert REFUSED[kind][2] in str(refusal.value)
    assert refusal.value.exit_code == 2
    if "dimensions" not in REFUSED[kind][2]:
        assert "unusual.0" in str(refusal.value)
    assert not (tmp_path / "run").exists()
