"""What describes a tiny model, and the fields that many of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "BOTH",
    "CAUSAL",
    "DECODER",
    "IDS",
    "IMAGES",
    "MASKED",
    "NO_DROPOUT",
    "SEQUENCES",
    "Architecture",
]


@dataclass(frozen=True)
class Architecture:
    """One tiny model of transformers."""

    head: str
    """The class of transformers, or an Auto class."""
    model_type: str
    fields: Mapping[str, Any]
    """Fields of the config."""
    kind: str = "text"
    """Kind of the batches, in architecture_batches.py."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the forward that are no tensors."""


CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
SEQUENCES, IMAGES = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"

IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64, **IDS,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BOTH: dict[str, Any] = {
    "vocab_size": 128, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "dropout": 0.0, "decoder_start_token_id": 2, **IDS,
}  # fmt: skip
