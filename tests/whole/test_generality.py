"""Architectures of transformers: which are captured, and which give plain PyTorch's bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from swaptrain.config.schema import Config
from swaptrain.errors import CaptureError
from tests.capture.in_memory import (
    captured_model,
    captured_with_evaluation,
    cut_everywhere,
    cut_into,
    eager_losses,
    eager_step,
    segment_losses,
    segment_step,
)
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, losses, reference, trained, weights

pytestmark = pytest.mark.trains

VOCABULARY = 64
Batch = dict[str, Tensor]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def text() -> list[Batch]:
    g = generator()
    ids = [torch.randint(3, VOCABULARY, (2, 16), generator=g) for _ in range(2)]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


def images() -> list[Batch]:
    g = generator()
    return [
        {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=g),
            "labels": torch.randint(0, 2, (2,), generator=g),
        }
        for _ in range(2)
    ]


def speech() -> list[Batch]:
    g = generator()
    return [
        {
            "input_features": torch.randn(2, 8, 32, generator=g),
            "labels": torch.randint(3, VOCABULARY, (2, 8), generator=g),
        }
        for _ in range(2)
    ]


def audio() -> list[Batch]:
    g = generator()
    return [
        {
            "input_values": torch.randn(2, 400, generator=g),
            "labels": torch.randint(1, 8, (2, 3), generator=g),
        }
        for _ in range(2)
    ]


@dataclass(frozen=True)
class Architecture:
    """A tiny model, and what is expected of it."""

    head: str
    """Class of transformers, or an Auto class."""
    fields: dict[str, Any]
    model_type: str = ""
    batches: Callable[[], list[Batch]] = text
    expected: str = "same bits"
    """`same bits`, `close` (on some processors the last bits differ), or `refused`."""
    refusal: str = ""
    """Part of the message."""


CAUSAL = "AutoModelForCausalLM"
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {**DECODER, "num_key_value_heads": 2}
SLIDING: dict[str, Any] = {**GROUPED, "head_dim": 8, "sliding_window": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "image_size": 32, "patch_size": 8, **NO_DROPOUT,
}  # fmt: skip
SEQUENCES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip

MODELS: dict[str, Architecture] = {
    "llama": Architecture(CAUSAL, GROUPED),
    "mistral": Architecture(CAUSAL, GROUPED),
    "qwen2": Architecture(CAUSAL, GROUPED),
    "qwen3": Architecture(CAUSAL, {**GROUPED, "head_dim": 8}),
    "gemma2": Architecture(CAUSAL, SLIDING),
    "gemma3_text": Architecture(CAUSAL, SLIDING),
    "phi3": Architecture(CAUSAL, GROUPED),
    "gpt_neox": Architecture(CAUSAL, DECODER),
    "opt": Architecture(
        CAUSAL, {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    ),
    "falcon": Architecture(CAUSAL, {**DECODER, "ffn_hidden_size": 64}),
    "mamba": Architecture(
        CAUSAL,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    ),
    "mamba2": Architecture(
        CAUSAL,
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2,
            "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8,
        },
    ),
    "gpt_oss": Architecture(
        CAUSAL, {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": Architecture(
        CAUSAL,
        {
            **DECODER, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "bert": Architecture("AutoModelForMaskedLM", {**DECODER, **NO_DROPOUT}),
    "distilbert": Architecture(
        "AutoModelForMaskedLM",
        {
            "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
            "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0,
        },
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
            "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
        },
    ),
    "bart": Architecture(
        "BartForConditionalGeneration", {**SEQUENCES, "max_position_embeddings": 32}
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        {
            **SEQUENCES, "num_mel_bins": 8, "max_source_positions": 16,
            "max_target_positions": 16, "decoder_start_token_id": 1,
        },
        batches=speech,
    ),
    "vit": Architecture("AutoModelForImageClassification", VISION, batches=images),
    "swin": Architecture(
        "AutoModelForImageClassification",
        {
            "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
            "num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0,
        },
        batches=images,
    ),
    "mixtral": Architecture(CAUSAL, {**GROUPED, "num_local_experts": 4}, expected="close"),
    "qwen2_moe": Architecture(
        CAUSAL,
        {
            **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
        },
        expected="close",
    ),
    "bloom": Architecture(
        CAUSAL,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        expected="refused",
        refusal="GeLUFunction",
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC",
        {
            "vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [8, 8],
            "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0, "layerdrop": 0.0, "hidden_dropout": 0.0,
            "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
        },
        batches=audio,
    ),
}  # fmt: skip


def factory_of(name: str, fields: dict[str, Any] | None = None) -> Callable[[], nn.Module]:
    architecture = MODELS[name]
    config = transformers.AutoConfig.for_model(
        architecture.model_type or name, **{**architecture.fields, **(fields or {})}
    )
    config.use_cache = False
    head: Any = getattr(transformers, architecture.head)

    def make() -> nn.Module:
        build = head.from_config if architecture.head.startswith("Auto") else head
        model: nn.Module = build(config)
        return model

    return make


UNLIKE = ("llama", "gemma2", "mamba", "bert", "t5", "whisper", "swin", "mixtral", "bloom")
"""Decoders, an encoder, both, recurrence, images, speech, experts, and one that is refused."""
CASES = [
    *(pytest.param(name, 12, id=f"{name}: a few cuts") for name in UNLIKE),
    *(
        pytest.param(name, 1, id=f"{name}: {a.expected}", marks=pytest.mark.proof)
        for name, a in MODELS.items()
    ),
]


@pytest.mark.parametrize(("name", "every"), CASES)
def test_a_step_by_segments_equals_plain_pytorch(name: str, every: int, tmp_path: Path) -> None:
    """Uncut and cut at every legal gap: losses, gradients and buffers of two micro-batches.

    And, cut so, the loss of a held-out batch in evaluation mode. By default some architectures are
    cut at every twelfth gap.
    """
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    architecture, factory = MODELS[name], factory_of(name)
    batches = architecture.batches()
    if architecture.expected == "refused":
        with pytest.raises(CaptureError, match=architecture.refusal):
            captured_model(factory, batches[0], tmp_path)
        return
    held_out = batches[1:]
    uncut, evaluations = captured_with_evaluation(factory, batches[:1], tmp_path)
    plain = eager_step(factory, batches)
    whole = segment_step(cut_into(uncut, 1 << 40), factory, batches)
    pieces = cut_everywhere(uncut, every=every)
    assert len(pieces.model.segments) * every > 20
    torch.manual_seed(0)
    model = factory()
    expected = eager_losses(model, held_out)
    evaluated = segment_losses(pieces, evaluations, model, held_out)
    assert evaluated == (expected if architecture.expected == "same bits" else close(expected))
    swapped = segment_step(pieces, factory, batches)
    assert swapped.differences(whole) == []
    if architecture.expected == "same bits":
        assert swapped.differences(plain) == []
        return
    for left, right in zip(swapped.losses, plain.losses, strict=True):
        assert left == pytest.approx(right, rel=1e-5)
    for parameter, gradient in plain.gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            swapped.gradients[parameter], gradient, rtol=1e-4, atol=1e-5 * scale
        )


DRAWING: dict[str, dict[str, Any]] = {
    "swin": {"drop_path_rate": 0.3, "hidden_dropout_prob": 0.2},
    "whisper": {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1},
    "bart": {"dropout": 0.2, "activation_dropout": 0.1},
    "t5": {"dropout_rate": 0.2},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "mixtral": {"output_router_logits": True, "router_jitter_noise": 0.1},
}


@pytest.mark.parametrize("name", proof_but(DRAWING, "swin"))
def test_an_architecture_that_draws_evaluates_without_draws(name: str, tmp_path: Path) -> None:
    """Stochastic depth, dropout and jitter are off: the loss has the bits of plain PyTorch."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    factory = factory_of(name, DRAWING[name])
    held_out = [{k: v[:1].clone() for k, v in MODELS[name].batches()[0].items()}]
    uncut, evaluations = captured_with_evaluation(factory, held_out, tmp_path)
    torch.manual_seed(0)
    model = factory()
    expected = eager_losses(model, held_out)
    evaluated = segment_losses(cut_everywhere(uncut), evaluations, model, held_out)
    assert evaluated == (expected if MODELS[name].expected == "same bits" else close(expected))


@pytest.mark.proof
def test_experts_in_float32_leave_the_rest_of_the_model_its_eager_branches(tmp_path: Path) -> None:
    """Qwen 3 Next solves its triangular systems by substitution only where it is exported."""
    fields = {
        **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    config = transformers.AutoConfig.for_model("qwen3_next", **fields, use_cache=False)
    graph = captured_model(lambda: _built(config), text()[0], tmp_path).captured.graph
    solves = torch.ops.aten.linalg_solve_triangular.default
    assert any(node.target is solves for node in graph.nodes)


def _built(config: Any) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-5)


def _job(tmp_path: Path, hf: dict[str, Any], *, segment: str) -> Config:
    tree = {
        "model": {"hf": hf},
        "data": {"python": "tests.support.datasets:text", "micro_batches": 2},
        "memory": {"segment": segment},
        "train": {"steps": 2, "seed": 3, "threads": 1},
    }
    return config_of(tmp_path / "run", tree)


@pytest.mark.proof
def test_a_gradient_in_another_layout_keeps_its_bits_on_the_disk(tmp_path: Path) -> None:
    """Qwen 3 cut between its head norms and the transposes behind them, trained from the disk."""
    config = _job(tmp_path, {"model_type": "qwen3", **GROUPED, "head_dim": 8}, segment="1KiB")
    run_dir = trained(config)
    plain = reference(config)
    assert losses(run_dir) == plain.losses
    assert_same_bits(weights(run_dir), plain.parameters)


@pytest.mark.proof
def test_planning_reads_no_memory_that_was_never_written(tmp_path: Path) -> None:
    """Experts take tokens back into their order: of zeros for that order most places are missing.

    Memory that nobody has written is filled with the largest number here, which is no place.
    """
    mixtral = {"model_type": "mixtral", **GROUPED, "num_local_experts": 4}
    config = _job(tmp_path, mixtral, segment="16KiB")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        run_dir = trained(config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(run_dir) == pytest.approx(reference(config).losses, rel=1e-5)
