"""Models and datasets that a run has to refuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DataDependent", "TwoShapes", "any_keyword", "data_dependent", "labelled", "linear"]
__all__ += ["next_token", "no_loss", "paired", "two_shapes"]


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


class NextToken(Linear):
    """Takes no labels."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


class Paired(Linear):
    """Takes an argument more than there are, and one that it does not need."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, weights: Tensor, scale: float = 1.0
    ) -> Tensor:
        return super().forward(input_ids) * scale + (labels * weights).sum()


class AnyKeyword(Linear):
    """Says nothing of what it takes."""

    def forward(self, **inputs: Tensor) -> Tensor:
        return super().forward(inputs["input_ids"]) + inputs["labels"].sum()


class Labelled:
    """Items of two keys."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.ones(16), "labels": torch.ones(16)}


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


def next_token() -> nn.Module:
    return NextToken()


def paired() -> nn.Module:
    return Paired()


def any_keyword() -> nn.Module:
    return AnyKeyword()


def labelled() -> Labelled:
    return Labelled()


def two_shapes() -> TwoShapes:
    return TwoShapes()
