"""`model.dtype: float16`: torch's GradScaler, with overflows that are skipped, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from swaptrain.compute.loss_scale import LossScale
from swaptrain.errors import ConfigError, NotFiniteError
from swaptrain.observe.progress_line import RunSoFar, progress_line
from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.store.read.live_store import look
from tests.support.matrix import proof_but
from tests.support.runs import (
    assert_same_bits,
    assert_same_state,
    config_of,
    losses,
    reference,
    rows,
    trained,
    weights,
)
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

GPT: dict[str, Any] = {  # its first step overflows at the scale that a GradScaler begins with
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 2}, "dtype": "float16"},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "32KiB"},
    "train": {"steps": 5},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "overflows": GPT,
    "clipped": {**GPT, "optimizer": {"clip_norm": 0.3, "lr": 1e-2}},
    "parts": {**GPT, "memory": {"segment": "200KiB"}, "store": {"chunk": "8KiB"}},
    "trees": {**GPT, "store": {"commit": {"every": 2}}},
    "8bit": {**GPT, "optimizer": {"state": "8bit", "lr": 1e-2}},
    "one": {**GPT, "data": {**GPT["data"], "micro_batches": 1}},
    "llama": {
        **GPT,
        "model": {"hf": LLAMA, "dtype": "float16"},
        "data": {"python": "tests.support.datasets:text"},
    },
    "lora-nf4": {
        **GPT,
        "model": {"hf": LLAMA, "dtype": "float16", "base": "nf4"},
        "lora": {"r": 4, "target_modules": "all-linear"},
        "data": {"python": "tests.support.datasets:text"},
    },
    "sgd": {**GPT, "optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.9}},
}


@pytest.mark.parametrize("name", proof_but(SETTINGS, "overflows", "clipped"))
def test_the_bits_are_those_of_a_gradscaler(tmp_path: Path, name: str) -> None:
    """Losses, weights, what is skipped; Adam counts updates, not steps."""
    config = config_of(tmp_path / "a", SETTINGS[name])
    run = trained(config)
    plain = reference(config)
    assert losses(run) == plain.losses
    assert_same_state(weights(run), plain, torch.float16)
    skipped = [not math.isfinite(norm) for norm in plain.grad_norms]
    assert [row.get("skipped", False) for row in rows(run)] == skipped
    assert [row["grad_norm"] is None for row in rows(run)] == skipped
    assert skipped[0] == (name not in ("llama", "lora-nf4")) and not skipped[-1]
    scales = [65536.0 / 2 ** sum(skipped[:step]) for step in range(5)]
    assert [row["loss_scale"] for row in rows(run)] == scales


@pytest.mark.proof
def test_a_run_goes_on_behind_a_skipped_step(tmp_path: Path) -> None:
    """With the scale and the count of updates that its records have; also from a snapshot."""
    whole = trained(config_of(tmp_path / "a", {**GPT, "store": {"keep": {"every": 1, "last": 4}}}))
    for steps in (1, 3, 5):
        tree = {**GPT, "train": {"steps": steps}}
        run = trained(config_of(tmp_path / "b", tree))
        assert len(rows(run)) == steps
    assert_same_bits(weights(run), weights(whole))
    assert [r["loss_scale"] for r in rows(run)] == [r["loss_scale"] for r in rows(whole)]
    before = weights(whole)
    config = config_of(tmp_path / "a", {**GPT, "store": {"keep": {"every": 1, "last": 4}}})
    trained(config, from_step=2)
    assert_same_bits(weights(whole), before)


def test_the_scale_is_that_of_torch() -> None:
    """Over thousands of steps, with overflows now and then."""
    scaler = torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = LossScale()
    for step in range(9000):
        overflows = step in (0, 1, 700, 4100)
        weight.grad = torch.full((2,), float("inf") if overflows else 1.0)
        assert float(scaler.scale(torch.ones(()))) == ours.scale
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ours = ours.next(overflowed=overflows)
    assert ours.skipped == 4 and ours.scale == scaler.get_scale()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    for most in (2.0**127, 2.0**127):
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == most
    assert LossScale(2.0**126, 1999).next(overflowed=False).scale == 2.0**127
    assert LossScale(2.0**127, 1999).next(overflowed=False).scale == 2.0**127


class Diverging(torch.nn.Module):
    """Its loss is never finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x.to(self.linear.weight.dtype)).float() * float("inf")).sum()


def test_a_loss_that_is_never_finite_ends_the_run(tmp_path: Path) -> None:
    """Once the scale is below 1: it is not the scale that overflows."""
    tree = {
        **GPT,
        "model": {"python": "tests.whole.test_float16:Diverging", "dtype": "float16"},
        "data": {"python": "tests.support.datasets:vectors"},
        "train": {"steps": 40, "check_capture": False},
    }
    with pytest.raises(NotFiniteError) as error:
        trained(config_of(tmp_path / "a", tree))
    assert error.value.step == 18 and len(rows(tmp_path / "a")) == 17


class Rootless(torch.nn.Module):
    """Its loss is always finite, and no gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.to(self.linear.weight.dtype)).float()
        return (y * 0).sqrt().sum() * 0


def test_gradients_that_are_never_finite_end_the_run(tmp_path: Path) -> None:
    """They would be skipped for ever, and nothing learned; the error names one."""
    tree = {
        **GPT,
        "model": {"python": "tests.whole.test_float16:Rootless", "dtype": "float16"},
        "data": {"python": "tests.support.datasets:vectors"},
        "train": {"steps": 40, "check_capture": False},
    }
    with pytest.raises(NotFiniteError, match=r"gradient of linear\.\w+ .* is not finite") as error:
        trained(config_of(tmp_path / "a", tree))
    assert error.value.step == 31 and len(rows(tmp_path / "a")) == 30


def test_a_line_that_is_written_again_says_that_its_step_was_skipped(tmp_path: Path) -> None:
    config = config_of(tmp_path / "a", {**GPT, "train": {"steps": 1}})
    run = trained(config)
    (line,) = rows(run)
    assert line["skipped"]
    (run / "metrics.jsonl").write_bytes(b"")
    trained(config_of(tmp_path / "a", {**GPT, "train": {"steps": 2}}))
    again = rows(run)[0]
    assert {key: again.get(key) for key in ("skipped", "loss_scale", "grad_norm")} == {
        key: line.get(key) for key in ("skipped", "loss_scale", "grad_norm")
    }


def test_what_is_said_and_stored(tmp_path: Path) -> None:
    """The line of a skipped step; a float32 master beside float16 weights."""
    row = StepMetrics(
        step=1, loss=2.0, lr=0.1, tokens=8, step_s=1.0, loss_scale=65536.0, skipped=True
    )
    assert "| overflow at scale 65536, skipped |" in progress_line(row, RunSoFar(total_steps=9))
    run = trained(config_of(tmp_path / "a", {**GPT, "train": {"steps": 1}}))
    store = look(run)
    assert store is not None
    found = {(r.array, r.dtype) for one in store.records.values() for r in one.table}
    assert {("weights", "float16"), ("remainder_float32", "float32")} <= found
    with pytest.raises(ConfigError, match=r"master: none belongs to dtype: bfloat16"):
        config_of(tmp_path / "b", {**GPT, "model": {**GPT["model"], "master": "none"}})
