"""The job in plain PyTorch, everything in memory: what a machine with enough of it would do.

With `--device cuda` that is the GPU's memory.
"""

from __future__ import annotations

import torch
from job import options
from split_precision import train


def main() -> None:
    """Train."""
    job = options(__doc__ or "")

    def place(_: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=job.device)

    train(job, place)


if __name__ == "__main__":
    main()
