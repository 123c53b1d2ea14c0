"""The model and the data of vision.yaml: a vision transformer, and digits that are moved about."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import ViTConfig, ViTForImageClassification

__all__ = ["Classifier", "Digits", "classifier", "digits"]


class Classifier(nn.Module):
    """A vision transformer for images [B, 1, 8, 8] in ten classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 16,
            intermediate_size=2 * width,
            initializer_range=0.1,  # 0.02 is for a width of 768
            num_labels=10,
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean cross entropy of images [B, 1, 8, 8] and labels [B], and the accuracy."""
        logits = self.vit(pixel_values=images).logits  # [B, 10]
        return {
            "loss": nn.functional.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(dim=-1) == labels).float().mean(),
        }


def classifier(width: int = 96, layers: int = 3) -> nn.Module:
    """Return the model: what `model.python` names."""
    return Classifier(width, layers)


class Digits:
    """scikit-learn's images: `images` [1, 8, 8] in [-1, 1] and a label; a map-style dataset."""

    def __init__(self, split: Literal["train", "test"], shift: int) -> None:
        """Test is every sixth of the 1,797 images. Each moves by at most `shift` pixels."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        in_test = torch.arange(len(labels)) % 6 == 5
        chosen = in_test if split == "test" else ~in_test
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        self.images, self.labels = images[chosen], torch.tensor(labels, dtype=torch.int64)[chosen]
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return an item, moved anew in each epoch: the draw is seeded for the epoch and the item.

        Random transforms, such as torchvision's, are written the same way: no generator of their
        own, no counter.
        """
        image, most = self.images[index], self.shift
        if most:
            down, right = torch.randint(0, 2 * most + 1, (2,)).tolist()
            image = pad(image, (most,) * 4, value=-1.0)[:, down : down + 8, right : right + 8]
        return {"images": image, "labels": self.labels[index]}


def digits(split: Literal["train", "test"], shift: int = 0) -> Digits:
    """Return the dataset: what `data.python` and `eval.python` name."""
    return Digits(split, shift)
