"""Parameters on one memory are refused by name; tied ones and pieces of one tensor train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swaptrain.errors import CaptureError
from tests.capture.in_memory import captured_model

pytestmark = pytest.mark.trains


class Pair(nn.Module):
    """Two layers, which a test lets share memory."""

    def __init__(self, share: Callable[[Pair], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def data(pair: Pair) -> None:
    pair.second.weight.data = pair.first.weight.data


def transposed(pair: Pair) -> None:
    pair.second.weight.data = pair.first.weight.data.t()


def parameter_of(pair: Pair) -> None:
    pair.second.weight = nn.Parameter(pair.first.weight.detach())


def frozen_part(pair: Pair) -> None:
    pair.second.bias = nn.Parameter(pair.first.weight.detach()[3], requires_grad=False)


def buffer(pair: Pair) -> None:
    pair.register_buffer("seen", pair.first.weight.detach())


def tied(pair: Pair) -> None:
    pair.second.weight = pair.first.weight


def halves(pair: Pair) -> None:
    both = torch.randn(128, 64)
    pair.first.weight, pair.second.weight = map(nn.Parameter, both.chunk(2))


def turns(pair: Pair) -> None:
    both = torch.randn(64, 128)
    pair.first.weight, pair.second.weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])


@pytest.mark.parametrize("share", [data, transposed, parameter_of, frozen_part, buffer])
def test_memory_that_two_see_is_refused(share: Callable[[Pair], None], tmp_path: Path) -> None:
    """The message names the parameter whose updates the other would see."""
    with pytest.raises(CaptureError, match=r"first\.weight.*(same memory|follow its)"):
        captured_model(lambda: Pair(share), {"x": torch.ones(2, 64)}, tmp_path)


@pytest.mark.parametrize("share", [tied, halves, turns])
def test_memory_of_one_is_taken(share: Callable[[Pair], None], tmp_path: Path) -> None:
    """A weight that is one object, and elements that no other parameter has."""
    captured = captured_model(lambda: Pair(share), {"x": torch.ones(2, 64)}, tmp_path)
    assert "first.weight" in captured.parameters
