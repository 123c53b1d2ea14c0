"""How much of a model is trained, and that it is what plain PyTorch trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from swaptrain.data import open_data
from swaptrain.models.trained import trained_parameters
from swaptrain.program.model import ParameterSpec
from swaptrain.program.tensors import TensorSpec
from swaptrain.reference import train_reference
from swaptrain.verbs.inspection.report import read_run
from swaptrain.verbs.plan import plan
from swaptrain.verbs.train import train
from tests.models.stored.test_pretrained import TEXT, tree_of
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights

pytestmark = pytest.mark.trains

MARIAN: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "max_position_embeddings": 32,
    "architectures": ["MarianMTModel"],
}  # fmt: skip
TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


def _shown(out: str) -> str:
    return next(line for line in out.splitlines() if "parameters are trained" in line)


@pytest.mark.proof
def test_the_constructors_frozen_tables_stay_frozen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the constructor's weights plain PyTorch does not train them; the start says so."""
    tree = {"model": {"hf": {"model_type": "marian", **MARIAN}}, "data": {"python": TEXT}}
    config = config_of(tmp_path / "run", {**tree, "train": {"steps": 1, "threads": 1}})
    planned = plan(config).trained
    trained(config)
    line = _shown(capsys.readouterr().out)
    assert "frozen by the constructor: model.encoder.embed_positions.weight, model.dec" in line
    model = transformers.MarianMTModel(transformers.MarianConfig(**MARIAN))
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert line.startswith(f"{numbers:,} of {sum(p.numel() for p in model.parameters()):,} para")
    root = read_run(config.run.dir).root
    assert root is not None and root.choices.trained == line == planned


@pytest.mark.proof
def test_begun_from_a_checkpoint_it_is_as_from_pretrained_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers trains what it has loaded: losses and weights are its, over a resume too."""
    directory = tmp_path / "checkpoint"
    torch.manual_seed(5)
    transformers.MarianMTModel(transformers.MarianConfig(**MARIAN)).save_pretrained(directory)
    config = config_of(tmp_path / "run", tree_of(directory, train={"steps": 2, "threads": 1}))
    train(config)
    train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 3})}))
    out = capsys.readouterr().out

    def loaded() -> nn.Module:
        model: nn.Module = transformers.MarianMTModel.from_pretrained(directory)
        return model

    frozen = {name for name, p in loaded().named_parameters() if not p.requires_grad}
    assert ("frozen by the constructor" in _shown(out)) == bool(frozen)
    assert ("so does this run" in out) == (not frozen)
    data = open_data(config.data, seed=0, run_dir=tmp_path / "plain", model_vocabulary=64)
    plain = train_reference(
        loaded, data.batch, steps=3, micro_batches=3, lr=1e-2, weight_decay=0.1,
        schedule=config.resolved().optimizer.schedule,
    )  # fmt: skip
    assert losses(config.run.dir) == plain.losses
    buffer = loaded().get_buffer("final_logits_bias")
    assert_same_bits(weights(config.run.dir), plain.parameters | {"final_logits_bias": buffer})


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(2, 3))
        self.frozen = nn.ParameterList([nn.Parameter(torch.ones(2), False) for _ in range(12)])
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3)).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.table = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)


def test_reasons_and_patterns() -> None:
    module = Parts()
    parameters = {
        name: ParameterSpec(TensorSpec(name, tuple(p.shape), p.stride(), "float32"), "float32",
                            name == "used")
        for name, p in module.named_parameters()
    }  # fmt: skip
    own = [name for name in parameters if name.startswith("frozen")]
    found = trained_parameters(module, parameters, "my:model", [*own, "layers.0.weight"])
    assert (found.count, found.total) == (6, 6 + 24 + 18 + 5 + 4)
    assert found.frozen["the loss does not reach"] == ("unused",)
    assert found.frozen["no floating-point numbers"] == ("table",)
    assert found.frozen["frozen by my:model"][:2] == ("frozen.0", "frozen.1")
    assert found.frozen["frozen by train.freeze"][0] == "layers.0.bias"
    assert "frozen by my:model: frozen.* (12), layers.0.weight; frozen by" in found.line()
    assert "by train.freeze: layers.*.bias (3), layers.*.weight (2)" in found.line()
