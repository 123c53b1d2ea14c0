"""Small models whose forwards, hooks or constructors do what a graph of operations cannot see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WIDTH", "Base", "batches"]

WIDTH = 16


class Base(nn.Module):
    """Three layers; `prepare` runs at the end of the constructor, `middle` in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, 4)
        self.prepare()

    def prepare(self) -> None:
        """Register what the member needs."""

    def middle(self, h: Tensor) -> Tensor:
        """Do between two layers what the member is about."""
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss; h is [B, WIDTH]."""
        h = self.middle(torch.tanh(self.a(x)))
        return F.cross_entropy(self.c(torch.tanh(self.b(h))), y)


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    """Return micro-batches of 4 items."""
    g = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(4, WIDTH, generator=g), "y": torch.randint(0, 4, (4,), generator=g)}
        for _ in range(count)
    ]
