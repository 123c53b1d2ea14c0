"""Tiny models of text: decoders, encoders, and encoders with a decoder."""

from __future__ import annotations

from typing import Any

from architecture_fields import (
    BOTH,
    CAUSAL,
    DECODER,
    IDS,
    MASKED,
    NO_DROPOUT,
    SEQUENCES,
    Architecture,
)

__all__ = ["DECODERS", "ENCODERS", "ENCODER_DECODERS"]

GROUPED: dict[str, Any] = {**DECODER, "num_key_value_heads": 2}
SLIDING: dict[str, Any] = {
    **GROUPED, "head_dim": 16, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
EXPERTS: dict[str, Any] = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
ENCODER: dict[str, Any] = {**DECODER, **NO_DROPOUT}
CLASSIFIER: dict[str, Any] = {**ENCODER, "num_labels": 3}
LONG: dict[str, Any] = {**BOTH, "max_position_embeddings": 64}
T5: dict[str, Any] = {
    "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
DECODERS: dict[str, Architecture] = {
    "llama untied": Architecture(CAUSAL, "llama", GROUPED),
    "llama tied": Architecture(CAUSAL, "llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": Architecture(CAUSAL, "qwen2", GROUPED),
    "qwen2 tied": Architecture(CAUSAL, "qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": Architecture(CAUSAL, "qwen3", {**GROUPED, "head_dim": 16}),
    "gemma3_text": Architecture(CAUSAL, "gemma3_text", SLIDING),
    "gemma2": Architecture(CAUSAL, "gemma2", SLIDING),
    "gemma": Architecture(CAUSAL, "gemma", {**GROUPED, "head_dim": 16}),
    "phi3": Architecture(CAUSAL, "phi3", GROUPED),
    "phi": Architecture(CAUSAL, "phi", DECODER),
    "olmo2": Architecture(CAUSAL, "olmo2", GROUPED),
    "olmo": Architecture(CAUSAL, "olmo", GROUPED),
    "olmo3": Architecture(
        CAUSAL,
        "olmo3",
        {**GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": Architecture(CAUSAL, "mistral", {**GROUPED, "sliding_window": 8}),
    "mixtral": Architecture(CAUSAL, "mixtral", {**GROUPED, "num_local_experts": 4}),
    "qwen3_moe": Architecture(
        CAUSAL, "qwen3_moe", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 16}
    ),
    "qwen2_moe": Architecture(
        CAUSAL,
        "qwen2_moe",
        {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "deepseek_v3": Architecture(
        CAUSAL,
        "deepseek_v3",
        {
            **DECODER, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_neox": Architecture(CAUSAL, "gpt_neox", DECODER),
    "falcon": Architecture(
        CAUSAL,
        "falcon",
        {
            "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "ffn_hidden_size": 128, "max_position_embeddings": 64, **IDS,
        },
    ),
    "mpt": Architecture(
        CAUSAL,
        "mpt",
        {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    ),
    "starcoder2": Architecture(
        CAUSAL,
        "starcoder2",
        {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "granite": Architecture(CAUSAL, "granite", GROUPED),
    "smollm3": Architecture(CAUSAL, "smollm3", GROUPED),
    "mamba2": Architecture(
        CAUSAL,
        "mamba2",
        {
            "vocab_size": 128, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2,
            "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8, **IDS,
        },
    ),
    "mamba": Architecture(
        CAUSAL,
        "mamba",
        {"vocab_size": 128, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, **IDS},
    ),
    "gpt2": Architecture(
        CAUSAL,
        "gpt2",
        {
            "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **IDS,
        },
    ),
    "llama seqcls": Architecture(
        "LlamaForSequenceClassification", "llama", {**GROUPED, "num_labels": 3}, "classified text"
    ),
    "gptj": Architecture(
        CAUSAL,
        "gptj",
        {
            "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **IDS,
        },
    ),
    "opt": Architecture(
        CAUSAL,
        "opt",
        {
            "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64,
            "dropout": 0.0, **IDS,
        },
    ),
    "bloom": Architecture(
        CAUSAL, "bloom", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4, **IDS}
    ),
    "stablelm": Architecture(CAUSAL, "stablelm", GROUPED),
    "cohere": Architecture(CAUSAL, "cohere", GROUPED),
    "cohere2": Architecture(CAUSAL, "cohere2", SLIDING),
    "glm4": Architecture(CAUSAL, "glm4", {**GROUPED, "head_dim": 16}),
    "nemotron": Architecture(CAUSAL, "nemotron", {**GROUPED, "head_dim": 16}),
    "gpt_oss": Architecture(
        CAUSAL, "gpt_oss", {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "olmoe": Architecture(CAUSAL, "olmoe", EXPERTS),
    "granitemoe": Architecture(
        CAUSAL, "granitemoe", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "lfm2": Architecture(
        CAUSAL, "lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"]}
    ),
    "qwen3_next": Architecture(
        CAUSAL,
        "qwen3_next",
        {
            **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "recurrent_gemma": Architecture(
        CAUSAL,
        "recurrent_gemma",
        {
            "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 64,
            "attention_window_size": 8, **IDS,
        },
    ),
    "rwkv": Architecture(
        CAUSAL,
        "rwkv",
        {
            "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
            "attention_hidden_size": 64, "context_length": 16, **IDS,
        },
    ),
}  # fmt: skip

ENCODERS: dict[str, Architecture] = {
    "layoutlm tok": Architecture(
        "LayoutLMForTokenClassification", "layoutlm", CLASSIFIER, "layouts"
    ),
    "bert mlm": Architecture(MASKED, "bert", ENCODER, "masked text"),
    "bert cls": Architecture(
        "BertForSequenceClassification", "bert", CLASSIFIER, "classified text"
    ),
    "bert qa": Architecture("BertForQuestionAnswering", "bert", ENCODER, "questions"),
    "roberta": Architecture(MASKED, "roberta", ENCODER, "masked text"),
    "distilbert": Architecture(
        MASKED,
        "distilbert",
        {
            "vocab_size": 128, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128,
            "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0,
            "pad_token_id": 0,
        },
        "masked text",
    ),
    "modernbert": Architecture(
        MASKED,
        "modernbert",
        {**DECODER, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
        "masked text",
    ),
    "electra": Architecture(MASKED, "electra", {**ENCODER, "embedding_size": 32}, "masked text"),
    "albert": Architecture(
        MASKED,
        "albert",
        {**ENCODER, "embedding_size": 32, "classifier_dropout_prob": 0.0},
        "masked text",
    ),
    "deberta_v2 cls": Architecture(
        "DebertaV2ForSequenceClassification",
        "deberta-v2",
        {
            **CLASSIFIER, "relative_attention": True, "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 64,
        },
        "classified text",
    ),
    "mpnet": Architecture(MASKED, "mpnet", ENCODER, "masked text"),
}  # fmt: skip

ENCODER_DECODERS: dict[str, Architecture] = {
    "t5": Architecture(SEQUENCES, "t5", T5, "sequences"),
    "bart": Architecture("BartForConditionalGeneration", "bart", LONG, "sequences"),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "whisper",
        {
            **BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16,
            "decoder_start_token_id": 1, "apply_spec_augment": False,
        },
        "speech",
    ),
    "mbart": Architecture("MBartForConditionalGeneration", "mbart", LONG, "sequences"),
    "marian": Architecture("MarianMTModel", "marian", LONG, "sequences"),
    "pegasus": Architecture("PegasusForConditionalGeneration", "pegasus", LONG, "sequences"),
    "mt5": Architecture(SEQUENCES, "mt5", T5, "sequences"),
}  # fmt: skip
