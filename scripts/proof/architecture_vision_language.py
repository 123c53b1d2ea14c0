"""Tiny models that read a text with a picture in it."""

from __future__ import annotations

from typing import Any

from architecture_fields import IDS, Architecture

__all__ = ["VISION_LANGUAGE"]

READ: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, **IDS,
}  # fmt: skip
SEE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip
LLAMA: dict[str, Any] = {"model_type": "llama", **READ}
GEMMA: dict[str, Any] = {**READ, "head_dim": 8}
CLIP: dict[str, Any] = {"model_type": "clip_vision_model", **SEE}
SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", **SEE}
TURNED: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
}
PATCHES: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
QWEN: dict[str, Any] = {
    "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}  # fmt: skip
VISION_LANGUAGE: dict[str, Architecture] = {
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        "llava",
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": 60},
        "image of 4",
    ),
    "llava_next": Architecture(
        "LlavaNextForConditionalGeneration",
        "llava_next",
        {
            "text_config": LLAMA, "vision_config": CLIP, "image_token_index": 60,
            "image_grid_pinpoints": [[16, 32], [32, 16]],
        },
        "tiled image",
    ),
    "paligemma": Architecture(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        {
            "text_config": {"model_type": "gemma", **GEMMA}, "vision_config": SIGLIP,
            "image_token_index": 60, "projection_dim": 32, "hidden_size": 32,
        },
        "typed image",
    ),
    "gemma3": Architecture(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "text_config": {"model_type": "gemma3_text", **GEMMA, "sliding_window": 8},
            "vision_config": SIGLIP, "image_token_index": 60, "mm_tokens_per_image": 4,
            "boi_token_index": 61, "eoi_token_index": 62,
        },
        "typed image",
    ),
    "qwen2_vl": Architecture(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {
            "text_config": {**READ, **TURNED},
            "vision_config": {**PATCHES, "embed_dim": 32, "mlp_ratio": 2}, **QWEN,
        },
        "gridded image",
    ),
    "qwen2_5_vl": Architecture(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {
            "text_config": {**READ, **TURNED},
            "vision_config": {
                **PATCHES, "intermediate_size": 64, "window_size": 16, "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
            },
            **QWEN,
        },
        "gridded image",
    ),
    "qwen3_vl": Architecture(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {
            "text_config": {**READ, "head_dim": 8, **TURNED},
            "vision_config": {
                **PATCHES, "intermediate_size": 64, "out_hidden_size": 32,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            },
            **QWEN,
        },
        "gridded image",
    ),
    "idefics3": Architecture(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        {
            "text_config": LLAMA, "vision_config": SEE, "image_token_id": 60, "scale_factor": 2,
            "pad_token_id": 0,
        },
        "listed image",
    ),
    "smolvlm": Architecture(
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        {
            "text_config": LLAMA, "vision_config": SEE, "image_token_id": 60, "scale_factor": 2,
            "pad_token_id": 0,
        },
        "listed image",
    ),
    "internvl": Architecture(
        "InternVLForConditionalGeneration",
        "internvl",
        {
            "text_config": {"model_type": "qwen2", **READ},
            "vision_config": {**SEE, "image_size": [16, 16], "patch_size": [8, 8]},
            "image_token_id": 60,
        },
        "image of 1",
    ),
    "mistral3": Architecture(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {
            "text_config": {"model_type": "mistral", **READ, "head_dim": 8},
            "vision_config": {"model_type": "pixtral", **SEE, "head_dim": 8},
            "image_token_index": 60, "spatial_merge_size": 2, "vision_feature_layer": -1,
        },
        "sized image",
    ),
    "aria": Architecture(
        "AriaForConditionalGeneration",
        "aria",
        {
            "text_config": {
                "model_type": "aria_text", **READ, "moe_num_experts": 4, "moe_topk": 2,
                "moe_num_shared_experts": 1, "head_dim": 8,
            },
            "vision_config": {"model_type": "idefics3_vision", **SEE},
            "projector_patch_to_query_dict": {"4": 2}, "image_token_index": 60,
        },
        "image of 2",
    ),
}  # fmt: skip
