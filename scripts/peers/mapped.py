"""The job in plain PyTorch with weights, masters and moments in memory-mapped files.

The kernel pages; gradients are anonymous memory. What someone would try first.
"""

from __future__ import annotations

import os
import shutil

import torch
from job import options
from split_precision import train


def main() -> None:
    """Map one file per tensor, train, remove them."""
    job = options(__doc__ or "")
    if job.device.type != "cpu":
        raise SystemExit("memory-mapped state is computed with on the CPU only")
    shutil.rmtree(job.work, ignore_errors=True)
    job.work.mkdir(parents=True)

    def place(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        path = job.work / name
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, shape.numel()) * dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype).view(shape)

    try:
        train(job, place)
    finally:
        shutil.rmtree(job.work)


if __name__ == "__main__":
    main()
