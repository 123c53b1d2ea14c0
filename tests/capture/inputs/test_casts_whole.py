"""A bfloat16 run with a large target trains as the reference does, and says what it casts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swaptrain.errors import CaptureError
from tests.support.runs import assert_same_bits, config_of, losses, reference, trained, weights

pytestmark = pytest.mark.trains


class Priced(nn.Module):
    """A regression on a price about 1000, of an image and of a time in seconds."""

    def __init__(self, reconstructs: bool = False) -> None:
        super().__init__()
        self.c, self.h, self.out = nn.Conv2d(1, 4, 3), nn.Linear(144, 16), nn.Linear(16, 1)
        self.reconstructs = reconstructs

    def forward(self, x: Tensor, t: Tensor, price: Tensor) -> Tensor:
        h = torch.tanh(self.h(self.c(x).flatten(1)))
        found = self.out(h).float().squeeze(-1) + 0.0 * torch.sin(t)
        loss = (found - (price - 1000.0)).pow(2).mean()
        return loss + x.mean() if self.reconstructs else loss


class Items:
    """Images with float64 prices, as NumPy gives them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(1, 8, 8, generator=generator),
            "t": torch.tensor(999.0 + index),
            "price": torch.tensor(1001.0 + index % 2, dtype=torch.float64),
        }


def items() -> Items:
    return Items()


def test_targets_keep_their_digits_and_the_reference_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and masters are the plain loop's; with a rounded price they would be others."""
    tree = {
        "model": {"python": "tests.capture.inputs.test_casts_whole:Priced", "dtype": "bfloat16"},
        "data": {"python": "tests.capture.inputs.test_casts_whole:items"},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "train": {"steps": 4, "threads": 1},
    }
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    plain = reference(config)
    assert losses(run_dir) == plain.losses
    found = weights(run_dir)
    assert_same_bits(found, {name: plain.parameters[name] for name in found})
    out = " ".join("".join(capsys.readouterr()).split())
    assert "cast: price (float64 to float32), x (float32 to bfloat16)" in out
    assert "as they are: t (float32)" in out
    tree["model"]["kwargs"] = {"reconstructs": True}
    twice = config_of(tmp_path / "twice", tree)
    with pytest.raises(CaptureError, match="x would be cast"):
        trained(twice)
    assert not (tmp_path / "twice").exists()
