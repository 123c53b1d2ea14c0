"""A small model and data for the Trainer and for swaptrain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

__all__ = ["Noted", "arguments", "items", "llama"]

WORDS, LENGTH = 61, 12


def llama(seed: int = 7) -> LlamaForCausalLM:
    """Return a model of 19,000 parameters, the same for a seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def items(count: int, *, ragged: bool = False) -> list[dict[str, Tensor]]:
    """Return items of 12 tokens; `ragged`: with unequally many labels."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: number % 5 if ragged else 0] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(to: Path, **changed: Any) -> TrainingArguments:
    """Return arguments of a short training with a warmup, a linear decay, and clipping."""
    usual: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.01,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
    }
    return TrainingArguments(output_dir=str(to), **{**usual, **changed})


class Noted(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Items that note the numbers by which they are asked for."""

    def __init__(self, found: list[dict[str, Tensor]]) -> None:
        self.found, self.asked = found, list[int]()

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(int(index))
        return self.found[index]
