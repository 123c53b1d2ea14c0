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


def with_grids(tokens: int, patches: int, width: int) -> Callable[[], list[Batch]]:
    """Return batches as Qwen-VL's processor makes them: flat patches and the grid of each image."""

    def batches() -> list[Batch]:
        generator = torch.Generator().manual_seed(2)
        side = int(patches**0.5)
        return [
            batch
            | {
                "pixel_values": torch.randn(2, patches, width, generator=generator),
                "image_grid_thw": torch.tensor([[1, side, side]] * 2),
                "mm_token_type_ids": (batch["input_ids"] == IMAGE).int(),
            }
            for batch in text(tokens)
        ]

    return batches


def with_sizes() -> list[Batch]:
    """Return batches as LLaVA-NeXT's processor makes them: three tiles and the image's size."""
    generator = torch.Generator().manual_seed(2)
    sizes = {"image_sizes": torch.tensor([[16, 32], [16, 32]])}
    return [
        batch | sizes | {"pixel_values": torch.randn(2, 3, 3, 16, 16, generator=generator)}
        for batch in text(4 + 8 + 2)
    ]


def with_types() -> list[Batch]:
    """Return batches with the token types that Gemma's processors make."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for batch in text(4):
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
        batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator)
        found.append(batch)
    return found


LLAMA = {"model_type": "llama", **TEXT}
GEMMA = {**TEXT, "head_dim": 8}
CLIP = {"model_type": "clip_vision_model", **VISION}
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
QWEN = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
TOKENS = {
    "image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}  # fmt: skip

MODELS: dict[str, VisionLanguage] = {
    "llava": VisionLanguage(
        "LlavaForConditionalGeneration", "LlavaConfig",
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": IMAGE},
        with_pixels(4, 2, 3, 16, 16),
    ),
    "llava_next": VisionLanguage(
        "LlavaNextForConditionalGeneration", "LlavaNextConfig",
        {
            "text_config": LLAMA, "vision_config": CLIP, "image_token_index": IMAGE,
            "image_grid_pinpoints": [[16, 32], [32, 16]],
        },
        with_sizes,
    ),
    "paligemma": VisionLanguage(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
        {
            "text_config": {"model_type": "gemma", **GEMMA}, "vision_config": SIGLIP,
            "image_token_index": IMAGE, "projection_dim": 32, "hidden_size": 32,
        },
        with_types,
    ),
    "gemma3": VisionLanguage(
        "Gemma3ForConditionalGeneration", "Gemma3Config",
        {
            "text_config": {"model_type": "gemma3_text", **GEMMA, "sliding_window": 8},
            "vision_config": SIGLIP, "image_token_index": IMAGE, "mm_tokens_per_image": 4,
            "boi_token_index": 61, "eoi_token_index": 62,
        },
        with_types,
    ),
    "qwen2_vl": VisionLanguage(
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
        {
            "text_config": {**TEXT, **QWEN},
            "vision_config": {
                "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
                "mlp_ratio": 2,
            },
            **TOKENS,
        },
        with_grids(4, 16, 96),
    ),
    "qwen2_5_vl": VisionLanguage(
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
        {
            "text_config": {**TEXT, **QWEN},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4,
                "patch_size": 4, "window_size": 16, "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
            },
            **TOKENS,
        },
        with_grids(4, 16, 96),
    ),
    "qwen3_vl": VisionLanguage(
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig",
        {
            "text_config": {**TEXT, "head_dim": 8, **QWEN},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4,
                "patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            **TOKENS,
        },
        with_grids(4, 16, 96),
    ),
    "idefics3": VisionLanguage(
        "Idefics3ForConditionalGeneration", "Idefics3Config",
        {
            "text_config": LLAMA, "vision_config": VISION, "image_token_id": IMAGE,
            "scale_factor": 2, "pad_token_id": 0,
        },
        with_pixels(1, 2, 1, 3, 16, 16),
    ),
    "smolvlm": VisionLanguage(
        "SmolVLMForConditionalGeneration", "SmolVLMConfig",
        {
            "text_config": LLAMA, "vision_config": VISION, "image_token_id": IMAGE,
            "scale_factor": 2, "pad_token_id": 0,
        },
        with_pixels(1, 2, 1, 3, 16, 16),
    ),
    "internvl": VisionLanguage(
        "InternVLForConditionalGeneration", "InternVLConfig",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
            "image_token_id": IMAGE,
        },
        with_pixels(1, 2, 3, 16, 16),
    ),
    "mistral3": VisionLanguage(
        "Mistral3ForConditionalGeneration", "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8},
            "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
            "image_token_index": IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1,
        },
        lambda: [
            batch | {"image_sizes": torch.tensor([[16, 16]] * 2)}
            for batch in with_pixels(1, 2, 3, 16, 16)()
        ],
    ),
    "aria": VisionLanguage(
        "AriaForConditionalGeneration", "AriaConfig",
        {
            "text_config": {
                "model_type": "aria_text", **TEXT, "moe_num_experts": 4, "moe_topk": 2,
                "moe_num_shared_experts": 1, "head_dim": 8,
            },
            "vision_config": {"model_type": "idefics3_vision", **VISION},
            "projector_patch_to_query_dict": {"4": 2}, "image_token_index": IMAGE,
        },
        with_pixels(2, 2, 3, 16, 16),
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
