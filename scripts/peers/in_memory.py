"""The job in plain PyTorch, everything in memory: what a machine with enough RAM would do."""

from __future__ import annotations

import torch
from job import options
from split_precision import train


def place(_: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Put everything into memory."""
    return torch.empty(shape, dtype=dtype)


if __name__ == "__main__":
    train(options(__doc__ or ""), place)
