"""Safetensors that are read a few rows at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from swaptrain.models.stored.checkpoint import open_weights


def test_a_file_larger_than_the_memory_is_read_by_rows(tmp_path: Path) -> None:
    """One that is a hole: its last rows are zeros, and a mark behind them is found."""
    rows, width = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1000, 1024
    end = 2 * rows * width
    names = {
        "large": {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, end]},
        "mark": {"dtype": "I32", "shape": [2, 3], "data_offsets": [end, end + 24]},
    }
    header = json.dumps(names).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
        file.seek(0, os.SEEK_END)
        file.write(torch.arange(6, dtype=torch.int32).numpy().tobytes())
    weights = open_weights(path)
    assert torch.equal(weights.read_rows("mark", 1, 2), torch.tensor([[3, 4, 5]]).int())
    assert torch.equal(weights.read("mark"), torch.arange(6).int().reshape(2, 3))
    last = weights.read_rows("large", rows - 2, rows)
    assert last.shape == (2, width) and last.dtype == torch.bfloat16 and not last.any()
