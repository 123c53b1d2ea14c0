"""The comparison at the start of a run: when it is made, what it says, what it takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swaptrain.config.schema import Config
from swaptrain.errors import CaptureError, ConfigError
from swaptrain.memory.malloc import release
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes
from swaptrain.planning.check_capture.check import check_capture
from swaptrain.planning.check_capture.need import needed_bytes
from swaptrain.planning.prepare import Prepared
from swaptrain.verbs.train import train
from tests.support.matrix import every, proof_but
from tests.support.runs import config_of

pytestmark = pytest.mark.trains

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FACTORIES = {
    "convolutional": "image_labels", "lstm": "tokens", "bottleneck_unet": "images",
    "encoder_decoder": "pairs", "gpt": "tokens", "masked": "tokens", "frozen_mlp": "vectors",
    "part_frozen": "vectors", "drawn": "vectors",
}  # fmt: skip


def job(tmp_path: Path, model: dict[str, Any], data: str, **train: Any) -> Config:
    tree = {
        "model": model,
        "data": {"python": f"tests.support.datasets:{data}"},
        "train": {"steps": 1, "seed": 3, "threads": 1, **train},
    }
    return config_of(tmp_path / "run", tree).resolved()


def said(config: Config, prepared: Prepared) -> str:
    """Return the line that a start says of the comparison."""
    notes: list[str] = []
    check_capture(config, prepared, notes.append)
    return "\n".join(notes)


def prepared(config: Config) -> Prepared:
    return Prepared(config, None, lambda _: None)


def small(config: Config, host_bytes: int, **fields: Any) -> Config:
    """Return the config with another budget, and other fields of `train`."""
    memory = config.memory.model_copy(update={"host": host_bytes})
    changed = config.train.model_copy(update=fields)
    return config.model_copy(update={"memory": memory, "train": changed})


@pytest.mark.parametrize("model", every(4, FACTORIES))
def test_right_captures_have_the_same_bits(model: str, tmp_path: Path) -> None:
    """Batch norms, recurrent layers, tied, frozen and unused parameters, drawn constants."""
    config = job(tmp_path, {"python": f"tests.support.models:{model}"}, FACTORIES[model])
    assert "compared with plain PyTorch: same bits (2 steps, " in said(config, prepared(config))


@pytest.mark.parametrize("model", proof_but(["gpt", "lstm"], "gpt"))
def test_bfloat16_is_compared_in_float32(model: str, tmp_path: Path) -> None:
    """With a capture of its own; the captured bfloat16 graph stays as it is."""
    entry = {"python": f"tests.support.models:{model}", "dtype": "bfloat16"}
    config = job(tmp_path, entry, FACTORIES[model])
    ready = prepared(config)
    dtypes = {name: p.dtype for name, p in ready.built.initial.module.named_parameters()}
    assert "compared with plain PyTorch in float32: same bits" in said(config, ready)
    assert dtypes == {n: p.dtype for n, p in ready.built.initial.module.named_parameters()}


def test_a_run_that_differs_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """And trained as it was captured, where the config says so."""
    entry = {"python": "tests.planning.check_capture.members:c_library"}
    config = job(tmp_path, entry, "vectors")
    with pytest.raises(CaptureError, match=r"train\.check_capture: false"):
        train(config)
    assert not config.run.dir.exists()
    train(small(config, config.memory.host, check_capture=False))


def test_what_plain_pytorch_cannot_train_is_refused(tmp_path: Path) -> None:
    """A graph keeps what the backward needs where an operation in place has overwritten it."""
    entry = {"python": "tests.planning.check_capture.members:overwritten"}
    config = job(tmp_path, entry, "vectors")
    with pytest.raises(CaptureError, match=r"plain PyTorch fails on it: .*inplace operation"):
        train(config)
    assert not config.run.dir.exists()


@pytest.mark.proof
def test_it_is_made_at_creation_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume, in which the weights are others, says nothing of it."""
    config = job(tmp_path, {"python": "tests.support.models:gpt"}, "tokens")
    train(config)
    assert "compared with plain PyTorch: same bits" in capsys.readouterr().out
    train(small(config, config.memory.host, steps=2))
    assert "compared with" not in capsys.readouterr().out


def test_what_does_not_fit_is_said_and_may_be_required(tmp_path: Path) -> None:
    """Of a factory only the bytes that it would take."""
    config = job(tmp_path, {"python": "tests.support.models:gpt"}, "tokens")
    ready = prepared(config)
    line = said(small(config, 1 << 20), ready)
    assert line.startswith("not compared with plain PyTorch: that takes 25.0 MiB")
    assert "memory.host is 1.0 MiB" in line
    with pytest.raises(ConfigError, match="check_capture is required: that takes"):
        said(small(config, 1 << 20, check_capture="required"), ready)
    assert said(small(config, 1 << 20, check_capture=False), ready) == ""


@pytest.mark.proof
def test_a_model_of_transformers_is_compared_with_fewer_layers(tmp_path: Path) -> None:
    """As many as fit, and the line says so."""
    config = job(tmp_path, {"hf": LLAMA, "dtype": "bfloat16"}, "text")
    ready = prepared(config)
    host_bytes = needed_bytes(ready.plan.captured, "bfloat16") - 1
    line = said(small(config, host_bytes, check_capture="required"), ready)
    assert "compared with plain PyTorch with 2 layers in float32: same bits" in line


def test_no_generator_moves(tmp_path: Path) -> None:
    """What is drawn after the comparison is what would be drawn without it."""
    config = job(tmp_path, {"python": "tests.support.models:gpt"}, "tokens")
    ready = prepared(config)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    said(config, ready)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.proof
def test_the_memory_is_given_back(tmp_path: Path) -> None:
    """The base of a run is the same with and without; while it runs, it takes what it says."""
    entry = {"python": "tests.support.models:gpt", "kwargs": {"width": 384}}
    config = job(tmp_path, entry, "tokens")
    ready = prepared(config)
    said(config, ready)  # what torch keeps of a first call is not counted
    release()
    before, _ = resident_bytes(), reset_peak()
    said(config, ready)
    assert resident_bytes() - before < 4 << 20
    assert peak_resident_bytes() - before < needed_bytes(ready.plan.captured, "float32")
