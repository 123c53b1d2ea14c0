"""Small runs of several ranks, and their comparison with plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from swaptrain.config.schema import Config
from swaptrain.reference import ReferenceResult
from swaptrain.store.paths import rank_dir
from tests.support.runs import assert_same_state, config_of, losses, norms, weights

__all__ = ["ADAPTERS", "GPT", "LLAMA", "assert_same_as", "rank_config", "whole_weights"]

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt"},
    "data": {"python": "tests.support.datasets:tokens", "micro_batches": 4},
    "store": {"commit": {"unit": "step"}},
    "train": {"check_capture": False, "steps": 3},
    "memory": {"segment": "16KiB"},
    "distributed": {"timeout": 60},
}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": True, "max_position_embeddings": 32,
}  # fmt: skip
ADAPTERS: dict[str, Any] = {
    "model": {"hf": {**LLAMA, "tie_word_embeddings": False}},
    "data": {"python": "tests.support.datasets:text"},
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
}


def rank_config(run_dir: Path, tree: dict[str, Any]) -> Config:
    """Return the config of a small run; `tree` overrides keys of GPT's sections."""
    base = {name: dict(section) for name, section in GPT.items()}
    for name, section in tree.items():
        base[name] = {**base.get(name, {}), **section}
    if "hf" in base["model"]:
        base["model"].pop("python")
    base["store"]["commit"] = {"unit": "step", **base["store"]["commit"]}
    return config_of(run_dir, base)


def whole_weights(config: Config, ranks: int) -> dict[str, Tensor]:
    """Return the masters of the last commit of all ranks, by name."""
    found: dict[str, Tensor] = {}
    for rank in range(ranks):
        found.update(weights(rank_dir(config.run.dir, rank)))
    return found


def assert_same_as(config: Config, plain: ReferenceResult, *, ranks: int) -> None:
    """Assert that losses, norms and weights of a run have the bits of plain PyTorch.

    In bfloat16 without clipping the norms are formed of blocks.
    """
    for rank in range(ranks):
        run_dir = rank_dir(config.run.dir, rank)
        assert losses(run_dir) == plain.losses
        assert norms(run_dir) == plain.grad_norms
    assert_same_state(whole_weights(config, ranks), plain)
