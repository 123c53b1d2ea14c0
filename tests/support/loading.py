"""A factory that takes and frees far more memory than its model needs, as loading a file does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

__all__ = ["llama"]


def llama(passes: int, at_once_mib: int, fields: dict[str, Any]) -> nn.Module:
    """Hold and free arrays of many sizes, `passes` times `at_once_mib` MiB, then make a Llama.

    Between those that it frees some small ones stay, so that the heap is full of holes.
    """
    left = []
    for number in range(passes):
        held: list[np.ndarray[Any, Any]] = []
        while sum(array.nbytes for array in held) < at_once_mib << 20:
            held.append(np.ones(((len(held) * 7 + number) % 13 + 1) * 50_000, np.float32))
            left.append(np.ones(64, np.float32))
        assert held[-1].all()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    model.register_buffer("left", torch.tensor(float(len(left))), persistent=False)
    model.kept = left
    return model
