"""Losses and gradients that are not finite: nothing that comes of them is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swaptrain.errors import RunError
from swaptrain.verbs.export import export_weights
from tests.support.killing import final_state, metrics_key
from tests.support.matrix import proof_but
from tests.support.runs import config_of, losses, trained

pytestmark = pytest.mark.trains

POISONED: dict[str, Any] = {
    "model": {"python": "tests.support.models:frozen_mlp"},
    "data": {"python": "tests.whole.test_not_finite:poisoned"},
    "memory": {"segment": "1KiB"},
}


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_a_loss_that_is_not_finite_stops_before_the_first_update(
    clip_norm: float | None, tmp_path: Path
) -> None:
    """Step 2 has a NaN: exit 1, and the store is that of step 1, which can be exported."""
    tree = {**POISONED, "optimizer": {"clip_norm": clip_norm}}
    run_dir = tmp_path / "run"
    with pytest.raises(RunError, match="step 2: the loss of micro-batch 2 of 3 is nan"):
        trained(config_of(run_dir, tree))
    assert len(losses(run_dir)) == 1
    export_weights(run_dir, tmp_path / "w.safetensors", None)
    versions = {v for k, v in final_state(run_dir).items() if "/" not in k}
    assert versions == {"1"}


@pytest.mark.parametrize("clip_norm", proof_but([None, 0.3], 0.3))
def test_data_that_were_mended_are_computed_with_anew(
    clip_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a forward made of the NaN is believed: the run ends as if it had not been."""
    tree = {
        **POISONED,
        "optimizer": {"clip_norm": clip_norm},
        "train": {"steps": 4, "seed": 3, "threads": 1},
    }
    with pytest.raises(RunError, match="If its data are at fault, mend them"):
        trained(config_of(tmp_path / "run", tree))
    monkeypatch.setattr(Poisoned, "bad", 0.5)
    run, whole = (trained(config_of(tmp_path / name, tree)) for name in ("run", "whole"))
    assert metrics_key(run) == metrics_key(whole)
    assert final_state(run) == final_state(whole)


class Poisoned:
    """Vectors, of which number 8, in the second step, is not finite."""

    bad = float("nan")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((16,), self.bad if index == 8 else 0.1 * index)}


def poisoned() -> Poisoned:
    return Poisoned()


class NoDerivative(nn.Module):
    """The loss is finite; the gradient of `middle.weight` is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16, bias=False)
        nn.init.zeros_(self.middle.weight)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + (self.middle.weight * self.middle.weight).sqrt().sum()
        loss: Tensor = self.last(h).square().mean()
        return loss


def no_derivative() -> nn.Module:
    return NoDerivative()


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """The message has step, segment and parameter."""
    tree = {
        "model": {"python": "tests.whole.test_not_finite:no_derivative"},
        "data": {"python": "tests.support.datasets:vectors"},
        "memory": {"segment": "1KiB"},
    }
    with pytest.raises(RunError, match=r"step 1: the gradient of middle\.weight \(segment \d+\)"):
        trained(config_of(tmp_path / "run", tree))
