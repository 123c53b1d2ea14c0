"""Tiny mixtures of experts of transformers, all with eight experts."""

from __future__ import annotations

from typing import Any

__all__ = ["DENSE_MIXTURE", "EXPERTS", "MIXTURES"]

EXPERTS = 8
_DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_DECODER, "num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8},
    "mixtral": {**_DECODER, "num_local_experts": EXPERTS},
    "olmoe": {**_DECODER, "num_experts": EXPERTS},
    "granitemoe": {**_DECODER, "num_local_experts": EXPERTS},
    "gpt_oss": {
        **_DECODER, "num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8,
    },
    "deepseek_v3": {
        **_DECODER, "num_key_value_heads": 4, "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}  # fmt: skip
"""By model type of transformers: fields of its config."""
DENSE_MIXTURE: dict[str, Any] = {
    **_DECODER, "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "head_dim": 8,
    "intermediate_size_mlp": 16, "interleave_moe_layer_step": 1, "attn_temperature_tuning": False,
}  # fmt: skip
"""Of a llama4_text, which sends all tokens through all experts."""
