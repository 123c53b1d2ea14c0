"""Small data sets for models of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["captions"]


class _Captions:
    """Images with a text for each."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 60, (8,), generator=g)
        ids[-1] = 63
        return {"pixel_values": torch.randn(3, 32, 32, generator=g), "input_ids": ids}


def captions() -> _Captions:
    return _Captions()
