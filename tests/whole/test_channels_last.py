"""`train.channels_last`: the bits of plain PyTorch whose images are laid out so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swaptrain.errors import ConfigError
from swaptrain.models.build import model_factory
from swaptrain.verbs.plan import plan
from tests.support.runs import assert_same_state, config_of, losses, reference, trained, weights

pytestmark = pytest.mark.trains


class Network(nn.Module):
    """Two convolutions, with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), y)


class ByHand(Network):
    """The same, laid out as PyTorch's tutorial does it."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last), y)


def test_the_bits_are_those_of_a_model_laid_out_by_hand(tmp_path: Path) -> None:
    tree = {
        "data": {"python": "tests.support.datasets:image_labels"},
        "memory": {"host": "128MiB", "segment": "16KiB"},
        "train": {"steps": 4, "channels_last": True},
    }
    config = config_of(tmp_path / "run", {**tree, "model": {"python": f"{__name__}:Network"}})
    made = model_factory(config).make()
    assert made.second.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr,operator]
    run_dir = trained(config)
    by_hand = {
        **tree,
        "model": {"python": f"{__name__}:ByHand"},
        "train": {"steps": 4, "channels_last": False},
    }
    plain = reference(config_of(tmp_path / "plain", by_hand))
    assert losses(run_dir) == plain.losses
    assert_same_state(weights(run_dir), plain)


def test_a_trial_of_kernels_is_for_gpus(tmp_path: Path) -> None:
    tree = {
        "model": {"python": f"{__name__}:Network"},
        "data": {"python": "tests.support.datasets:image_labels"},
        "train": {"steps": 1, "cudnn_benchmark": True},
    }
    with pytest.raises(ConfigError, match=r"train\.cudnn_benchmark is of GPUs"):
        plan(config_of(tmp_path / "run", tree))
    tree["train"] = {"steps": 1, "cudnn_benchmark": True, "deterministic": True}
    with pytest.raises(ConfigError, match="not with deterministic"):
        config_of(tmp_path / "other", tree)
