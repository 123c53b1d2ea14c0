"""Models and datasets that a run has to refuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DataDependent", "TwoShapes", "data_dependent", "linear", "no_loss", "two_shapes"]


class Gate(nn.Module):
    """Decides by a value what it computes: no graph says that."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            return x
        return -x


class DataDependent(nn.Module):
    """A layer, and the gate behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.gate(self.layer(x)), x)


class Linear(nn.Module):
    """One layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), x)


class NoLoss(Linear):
    """Returns what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class TwoShapes:
    """Item 1 is longer than the others."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(17 if index == 1 else 16)}


def data_dependent() -> nn.Module:
    return DataDependent()


def linear(width: int = 16) -> nn.Module:
    return Linear(width)


def no_loss() -> nn.Module:
    return NoLoss()


def two_shapes() -> TwoShapes:
    return TwoShapes()
