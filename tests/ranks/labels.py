"""Sequences with unequally many trained labels."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["unequal"]


class _Labelled:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (16,), generator=g)
        labels = ids.clone()
        labels[: 1 + index % 9] = -100
        return {"input_ids": ids, "labels": labels}


def unequal() -> _Labelled:
    """Return a dataset."""
    return _Labelled()
