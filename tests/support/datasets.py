"""Small map-style datasets: item i is a function of i alone."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "Items",
    "answers",
    "image_labels",
    "images",
    "moved",
    "of_rank",
    "pairs",
    "pictures",
    "tokens",
]
__all__ += ["vectors"]


class Items:
    """Makes item i with a generator seeded by i."""

    def __init__(self, kind: str, length: int = 40) -> None:
        self.kind, self.length = kind, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(index)
        if self.kind == "images":
            return {"x": torch.randn(1, 16, 16, generator=g)}
        if self.kind == "image_labels":
            label = torch.randint(0, 10, (), generator=g)
            return {"x": torch.randn(1, 8, 8, generator=g), "y": label}
        if self.kind == "pictures":
            label = torch.randint(0, 10, (), generator=g)
            return {"pixel_values": torch.randn(1, 16, 16, generator=g), "labels": label}
        if self.kind == "pairs":
            return {
                "source": torch.randint(0, 40, (12,), generator=g),
                "target": torch.randint(0, 40, (10,), generator=g),
            }
        if self.kind == "vectors":
            return {"x": torch.randn(16, generator=g)}
        return {"ids": torch.randint(0, 50, (16,), generator=g)}


def images() -> Items:
    return Items("images")


def image_labels() -> Items:
    return Items("image_labels")


def pairs() -> Items:
    return Items("pairs")


def pictures() -> Items:
    """Images and labels under the names that transformers' models take."""
    return Items("pictures")


def tokens() -> Items:
    return Items("tokens")


def vectors() -> Items:
    return Items("vectors")


class _OtherTokens(Items):
    """Tokens of which the later items are others."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index + 100 if index >= 10 else index)


def of_rank(mark: str, lacks: int = 0) -> Items:
    """Return tokens; in rank 1 others, or fewer, for as long as there is a file of that name."""
    if os.environ.get("RANK") != "1" or not Path(mark).exists():
        return Items("tokens")
    return Items("tokens", 40 - lacks) if lacks else _OtherTokens("tokens")


class Moved(Items):
    """Images that are moved by a draw of torch's, and brightened by one of Python's."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        image = item["x"].roll(int(torch.randint(0, 8, ())), dims=-1)
        return {**item, "x": image * random.uniform(0.5, 1.5)}


def moved() -> Moved:
    return Moved("image_labels")


class TextItems:
    """Token sequences under the names that transformers' models take."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.sequence_length = vocabulary, length

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.vocabulary, (self.sequence_length,), generator=g)
        return {"input_ids": ids, "labels": ids.clone()}


class LabelledText(TextItems):
    """Token sequences with one of two labels each."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": ids[0] % 2}


def labelled_text(vocabulary: int = 64, length: int = 16) -> LabelledText:
    return LabelledText(vocabulary, length)


class Answers(TextItems):
    """Token sequences whose first half has no label, as a question has none."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        item["labels"][: self.sequence_length // 2] = -100
        return item


def answers(vocabulary: int = 64, length: int = 16) -> Answers:
    return Answers(vocabulary, length)


def text(vocabulary: int = 64, length: int = 16) -> TextItems:
    return TextItems(vocabulary, length)
