"""Tiny vision-language models of transformers, as data: class, config, and two micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["MODELS", "VisionLanguage"]

VOCABULARY, IMAGE, LENGTH = 64, 60, 24
Batch = dict[str, Tensor]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip


@dataclass(frozen=True)
class VisionLanguage:
    """One model that is built from `config` and trained on `batches()`."""

    head: str
    """The class of transformers."""
    config: str
    """The config's class."""
    fields: dict[str, Any]
    batches: Callable[[], list[Batch]]

    def make(self) -> nn.Module:
        """Construct it; the caller has seeded torch."""
        config = getattr(transformers, self.config)(**self.fields)
        model: nn.Module = getattr(transformers, self.head)(config)
        return model


def text(images: int, *, image: int = IMAGE, before: int = 2, seed: int = 1) -> list[Batch]:
    """Return two micro-batches of two rows; each row has `images` image tokens in a row."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        ids = torch.randint(3, 50, (2, LENGTH), generator=generator)
        ids[:, before : before + images] = image
        labels = ids.clone()
        labels[ids == image] = -100
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0  # padded: plain PyTorch leaves out a mask of ones, a capture cannot
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def with_pixels(images: int, *shape: int, **more: Any) -> Callable[[], list[Batch]]:
    """Return batches of `text` with normally distributed `pixel_values` of that shape."""

    def batches() -> list[Batch]:
        generator = torch.Generator().manual_seed(2)
        return [
            batch | {"pixel_values": torch.randn(*shape, generator=generator)}
            for batch in text(images, **more)
        ]

    return batches


MODELS: dict[str, VisionLanguage] = {
    "llava": VisionLanguage(
        "LlavaForConditionalGeneration", "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": IMAGE, "image_token_id": IMAGE,
        },
        with_pixels(4, 2, 3, 16, 16),
    ),
}  # fmt: skip


class Rows:
    """The rows of a model's batches, as a dataset; item i is row i modulo their number."""

    def __init__(self, name: str = "llava") -> None:
        self.rows = [
            {key: tensor[i] for key, tensor in batch.items()}
            for batch in MODELS[name].batches()
            for i in range(2)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def build(name: str = "llava") -> nn.Module:
    """Construct a model by name: a factory for `model.python`."""
    return MODELS[name].make()
