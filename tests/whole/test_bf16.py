"""In bfloat16 with split masters the bits do not depend on memory, and are the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swaptrain.capture.precision import kept_in_float32
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError
from tests.support.matrix import matrix, proof_but
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    norms,
    reference,
    trained,
    weights,
)

pytestmark = pytest.mark.trains

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {"python": "tests.support.models:gpt", "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:tokens"},
    },
    "convolutional": {
        "model": {"python": "tests.support.models:convolutional", "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:image_labels"},
    },
    "dropout": {
        "model": {
            "python": "tests.support.models:gpt", "dtype": "bfloat16", "kwargs": {"dropout": 0.1},
        },
        "data": {"python": "tests.support.datasets:tokens"},
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "large": {"memory": {"host": "1GiB"}},
    "small": {"memory": {"host": "40MiB"}},
    "commit-every-3": {"store": {"commit": {"every": 3}}},
}


def config_with(run_dir: Path, name: str, settings: dict[str, Any]) -> Config:
    tree = {**MODELS[name], **settings}
    tree["memory"] = {"segment": "100KiB", **settings.get("memory", {})}
    tree["train"] = {"steps": 3, "seed": 3, "threads": 1, **settings.get("train", {})}
    return config_of(run_dir, tree)


def outcome(config: Config) -> tuple[list[float], dict[str, Tensor]]:
    run_dir = trained(config)
    return losses(run_dir), weights(run_dir)


@pytest.mark.parametrize(
    ("name", "clip_norm", "micro_batches"), matrix(["gpt", "convolutional"], [None, 0.3], [1, 3])
)
def test_a_run_equals_the_reference_loop(
    name: str, clip_norm: float | None, micro_batches: int, tmp_path: Path
) -> None:
    """Losses, float32 masters and buffers are those of the loop in swaptrain.reference.

    Gradients of one micro-batch stay as narrow as autograd makes them, those of several are summed.
    """
    settings = {
        "data": {**MODELS[name]["data"], "micro_batches": micro_batches},
        "optimizer": {"clip_norm": clip_norm},
    }
    config = config_with(tmp_path / "run", name, settings)
    found_losses, found = outcome(config)
    plain = reference(config)
    assert found_losses == plain.losses
    assert norms(config.run.dir) == pytest.approx(plain.grad_norms, rel=1e-5)
    expected = {**plain.buffers, **plain.parameters}
    assert_same_bits(found, {n: t for n, t in expected.items() if n in found})
    assert set(plain.parameters) <= set(found)


@pytest.mark.parametrize("name", proof_but(MODELS, whole=[*MODELS][1:]))
def test_bits_do_not_depend_on_memory_and_commits(name: str, tmp_path: Path) -> None:
    """Budgets and the commit interval change traffic and not a single bit."""
    first = outcome(config_with(tmp_path / "first", name, {}))
    for label, settings in SETTINGS.items():
        other = outcome(config_with(tmp_path / label, name, settings))
        assert other[0] == first[0], label
        assert_same_bits(other[1], first[1])


def test_the_smallest_budget_that_works_gives_the_same_bits(tmp_path: Path) -> None:
    """The number in a refusal works when it is used, and changes no bits."""
    large = outcome(config_with(tmp_path / "large", "gpt", {}))
    tiny = config_with(tmp_path / "tiny", "gpt", {"memory": {"host": "1MiB"}})
    with pytest.raises(BudgetError, match=r"set memory\.host to") as refusal:
        trained(tiny)
    assert not (tmp_path / "tiny" / "store").exists()
    least = str(refusal.value).split("set memory.host to ")[1].split(",")[0].replace(" ", "")
    small = outcome(config_with(tmp_path / "small", "gpt", {"memory": {"host": least}}))
    assert small[0] == large[0]
    assert_same_bits(small[1], large[1])


@pytest.mark.proof
def test_dropout_draws_differ_between_steps_and_micro_batches(tmp_path: Path) -> None:
    """With dropout the first loss is another one than without, and another seed gives another."""
    without = outcome(config_with(tmp_path / "without", "gpt", {"train": {"steps": 1}}))
    with_dropout = outcome(config_with(tmp_path / "with", "dropout", {"train": {"steps": 1}}))
    assert without[0] != with_dropout[0]


def test_batch_norms_and_what_a_model_lists_stay_in_float32() -> None:
    """Parameters of batch norms and of listed modules keep their dtype; others are lowered."""

    class Listed(nn.Module):
        _keep_in_fp32_modules = ("router",)

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(2, 2)
            self.norm = nn.BatchNorm2d(2)
            self.out = nn.Linear(2, 2)

    assert kept_in_float32(Listed()) == {
        "router.weight", "router.bias", "norm.weight", "norm.bias",
    }  # fmt: skip
    assert kept_in_float32(nn.LSTM(2, 2)) == frozenset()
    assert torch.get_default_dtype() is torch.float32
