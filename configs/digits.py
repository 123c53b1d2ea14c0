"""The model and the data of digits.yaml: plain PyTorch, nothing of swaptrain's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["Network", "images", "network"]


class Network(nn.Module):
    """A residual network for images [B, 1, 8, 8] in ten classes; its forward returns the loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of images [B, 1, 8, 8] and labels [B]."""
        hidden = self.relu(self.norm(self.stem(images)))  # [B, C, 8, 8]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden.mean(dim=(2, 3)))  # [B, 10]
        return nn.functional.cross_entropy(logits, labels)


class Block(nn.Module):
    """Two convolutions with batch norm around a skip; [B, C, H, W] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, of the shape of its input."""
        result: Tensor = self.relu(hidden + self.body(hidden))
        return result


def network(width: int = 64, blocks: int = 4) -> nn.Module:
    """Return the model: what `model.python` names."""
    return Network(width, blocks)


def images(split: Literal["train", "test"]) -> Sequence[dict[str, Tensor]]:
    """Return the digits as items of `images` [1, 8, 8] in [0, 1] and a label: `data.python`.

    The last 297 of scikit-learn's 1,797 images are the test split.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    chosen = slice(0, 1500) if split == "train" else slice(1500, None)
    inputs = torch.tensor(pixels[chosen], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    targets = torch.tensor(labels[chosen], dtype=torch.int64)
    return [{"images": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
