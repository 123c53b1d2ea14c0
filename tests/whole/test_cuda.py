"""A CUDA device takes the same road; these need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swaptrain.generate import Sampling
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.generate import generate_text
from tests.compute.test_streams import MODELS, SETTINGS
from tests.generate import test_generate as writing
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights
from tests.whole.test_exactness import LLAMA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.trains,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

DETERMINISTIC = {"deterministic": True}


def _tree(model: str, settings: str, host: str, **train: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {**MODELS[model], **SETTINGS[settings], "device": "cuda"}
    if "eval" in tree:
        tree["eval"] = {**tree["eval"], "python": MODELS[model]["data"]["python"]}
    tree["memory"] = {"segment": "64KiB", **tree.get("memory", {}), "host": host}
    tree["train"] = {"steps": 3, "deterministic": True, **tree.get("train", {}), **train}
    return tree


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_budgets_and_what_is_saved_do_not_change_the_bits(
    model: str, settings: str, tmp_path: Path
) -> None:
    """On one device, with deterministic kernels."""
    large = trained(config_of(tmp_path / "large", _tree(model, settings, "2GiB")))
    tree = _tree(model, settings, "640MiB", recompute=True)
    small = trained(config_of(tmp_path / "small", tree))
    assert losses(large) == losses(small)
    assert_same_bits(weights(large), weights(small))


def test_the_loss_falls_as_on_the_cpu(tmp_path: Path) -> None:
    """In float32 the losses agree with the CPU's to rounding."""
    tree = {
        "model": {"hf": LLAMA},
        "data": {"python": "tests.support.datasets:text"},
        "memory": {"host": "2GiB", "segment": "64KiB"},
        "train": {"steps": 3},
    }
    cuda = losses(trained(config_of(tmp_path / "cuda", {**tree, "device": "cuda"})))
    cpu = losses(trained(config_of(tmp_path / "cpu", {**tree, "device": "cpu"})))
    assert cuda == pytest.approx(cpu, rel=1e-4)


@pytest.mark.parametrize("base", [None, "int8", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_a_base_that_is_read(base: str | None, dtype: str, tmp_path: Path) -> None:
    """Budgets change no bit; in float32 the losses are the CPU's to rounding."""
    tree = {
        "model": {"hf": LLAMA, "dtype": dtype, "base": base},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "data": {"python": "tests.support.datasets:text", "micro_batches": 2},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 3, "deterministic": True},
        "device": "cuda",
    }
    small = {**tree, "memory": {"host": "640MiB", "segment": "16KiB"}}
    small["train"] = {**tree["train"], "recompute": True}
    large_dir = trained(config_of(tmp_path / "large", {**tree, "memory": {"host": "2GiB"}}))
    small_dir = trained(config_of(tmp_path / "small", small))
    assert losses(large_dir) == losses(small_dir)
    assert_same_bits(weights(large_dir), weights(small_dir))
    if dtype == "float32":
        cpu = losses(trained(config_of(tmp_path / "cpu", {**tree, "device": "cpu"})))
        assert losses(large_dir) == pytest.approx(cpu, rel=1e-4)


def test_a_run_with_adapters_goes_on(tmp_path: Path) -> None:
    """A run of two steps and two more has the bits of one of four."""
    tree = {
        "model": {"hf": LLAMA, "dtype": "bfloat16", "base": "nf4"},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "data": {"python": "tests.support.datasets:text"},
        "device": "cuda",
        "memory": {"host": "2GiB", "segment": "64KiB"},
    }
    whole = trained(config_of(tmp_path / "whole", {**tree, "train": DETERMINISTIC | {"steps": 4}}))
    tree["train"] = DETERMINISTIC | {"steps": 2}
    trained(config_of(tmp_path / "parts", tree))
    tree["train"] = DETERMINISTIC | {"steps": 4}
    parts = trained(config_of(tmp_path / "parts", tree))
    assert_same_bits(weights(whole), weights(parts))


def test_text_comes_from_a_device_that_the_weights_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of transformers on the device, with all of the weights there, and with half."""
    config = writing.run_of(tmp_path, writing.MODELS["llama"], device="cuda")
    export_weights(config.run.dir, tmp_path / "out", None)
    sampling = Sampling(max_new_tokens=12)
    expected = writing.plain(tmp_path / "out", tmp_path / "words", sampling, "cuda")
    found = generate_text(config, writing.PROMPTS, sampling)
    assert [row.tolist() for row in found.tokens] == expected
    streams = writing.half(config, monkeypatch)
    found = generate_text(config, writing.PROMPTS, sampling)
    assert [row.tolist() for row in found.tokens] == expected
    assert 0 < streams[0].held_bytes < 2 * streams[0].total_bytes
