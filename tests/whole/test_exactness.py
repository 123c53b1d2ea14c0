"""Swapped training gives the bits of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from swaptrain.planning import choose
from swaptrain.planning.planner import Plan, Planner
from tests.support.matrix import matrix, proof_but
from tests.support.plain import PlainRuns
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    norms,
    trained,
    weights,
)

pytestmark = pytest.mark.trains

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": True, "max_position_embeddings": 32,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
    "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
    "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip

MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"hf": GPT2}, "text"),
    "llama-tied": ({"hf": LLAMA}, "text"),
    "t5": ({"hf": T5}, "text"),
    "convolutional": ({"python": "tests.support.models:convolutional"}, "image_labels"),
    "lstm": ({"python": "tests.support.models:lstm"}, "tokens"),
    "unet": ({"python": "tests.support.models:bottleneck_unet"}, "images"),
    "encoder-decoder": ({"python": "tests.support.models:encoder_decoder"}, "pairs"),
    "gpt": ({"python": "tests.support.models:gpt"}, "tokens"),
    "frozen": ({"python": "tests.support.models:frozen_mlp"}, "vectors"),
}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
VARIANTS: dict[str, dict[str, Any]] = {
    "one-segment": {},
    "segments": {"memory": {"segment": "64KiB"}, "train": {"recompute": True}},
    "many-segments": {"memory": {"segment": "4KiB"}, "train": {"recompute": False}},
    "clipped": {
        "memory": {"segment": "16KiB"}, "optimizer": {"clip_norm": 0.3},
        "train": {"recompute": False},
    },
    "sgd": {"memory": {"segment": "16KiB"}, "optimizer": SGD},
}  # fmt: skip


@pytest.mark.parametrize(("name", "variant"), matrix(MODELS, VARIANTS))
def test_losses_and_weights_equal_plain_pytorch(
    name: str, variant: str, tmp_path: Path, plain_runs: PlainRuns
) -> None:
    """In float32 on the CPU all losses and final weights equal plain PyTorch's, bit for bit."""
    model, data = MODELS[name]
    tree = {"model": model, **VARIANTS[variant]}
    tree["data"] = {"python": f"tests.support.datasets:{data}"}
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    assert norms(run_dir) == plain.grad_norms
    stored = weights(run_dir)
    assert_same_bits(
        stored, {n: t for n, t in {**plain.buffers, **plain.parameters}.items() if n in stored}
    )


POOL_MODES = ["fused", "clipped", "saving"]
SMALLEST_POOL = {
    *[("gpt2", "clipped"), ("llama-tied", "fused"), ("t5", "saving"), ("convolutional", "fused")],
    *[("lstm", "clipped"), ("unet", "saving"), ("encoder-decoder", "saving"), ("gpt", "fused")],
    ("frozen", "clipped"),
}
"""Each model once, each mode three times; the others run by hand."""


@pytest.mark.parametrize(
    ("name", "mode"),
    proof_but(
        product(MODELS, POOL_MODES),
        ("gpt2", "clipped"),
        ("unet", "saving"),
        ("convolutional", "fused"),
        whole=[case for case in product(MODELS, POOL_MODES) if case not in SMALLEST_POOL],
    ),
)
def test_the_smallest_pool_changes_no_bit(
    name: str,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain_runs: PlainRuns,
) -> None:
    """With slabs for one instruction only, so that nearly all is spilled, the bits stay plain's.

    Spilled is also what autograd saves, where that was asked for.
    """
    model, data = MODELS[name]
    tree = {
        "model": model,
        "data": {"python": f"tests.support.datasets:{data}"},
        "memory": {"segment": "16KiB"},
        "optimizer": {"clip_norm": 0.3 if mode == "clipped" else None},
        "train": {"recompute": mode != "saving"},
    }
    config = config_of(tmp_path / "run", tree)
    monkeypatch.setattr(choose, "TENSOR_BYTES", 0)  # small tensors, as many nodes
    plan = Planner.plan

    def smallest(planner: Planner) -> Plan:
        found = plan(planner)
        if mode == "saving":
            found = replace(found, builder=replace(found.builder, saves=_all(found)))
            found = replace(found, peaks=found.check())
        return replace(found, pool_bytes=found.peaks.instruction_bytes)

    monkeypatch.setattr(Planner, "plan", smallest)
    run_dir = trained(config)
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    stored = weights(run_dir)
    tensors = {**plain.buffers, **plain.parameters}
    assert_same_bits(stored, {name: tensors[name] for name in stored})


def _all(plan: Plan) -> frozenset[int]:
    assert plan.layouts.saved or len(plan.captured.model.segments) == 1
    return frozenset(plan.layouts.saved)
