"""Prompts and answers: only the answer's labels are trained, and answers differ in length."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Answers", "answers"]

LENGTH = 12
COUNTS = (11, 1, 0, 4, 7, 2, 2, 9)


class Answers:
    """Item i has `counts[i % len(counts)]` trained labels, at its end."""

    def __init__(self, counts: tuple[int, ...], vocabulary: int) -> None:
        self.counts, self.vocabulary = counts, vocabulary

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(index)
        ids = torch.randint(3, self.vocabulary, (LENGTH,), generator=g)
        labels = ids.clone()
        labels[: LENGTH - self.counts[index % len(self.counts)]] = -100
        return {"input_ids": ids, "labels": labels}


def answers(counts: tuple[int, ...] = COUNTS, vocabulary: int = 64) -> Answers:
    return Answers(tuple(counts), vocabulary)
