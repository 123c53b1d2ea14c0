"""An adapter in a directory of weights is refused, whatever its files are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swaptrain.errors import ConfigError
from swaptrain.verbs.train import train
from tests.models.stored.test_pretrained import saved, tree_of
from tests.support.runs import config_of
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

NAMES = [
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin",
    "adapter_model-00001-of-00002.safetensors", "pytorch_adapter.bin", "adapters.safetensors",
    "pytorch_lora_weights.safetensors",
]  # fmt: skip
TINY = {**LLAMA, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(TINY, tmp_path_factory.mktemp("adapters") / "base")


@pytest.mark.parametrize("name", NAMES)
def test_beside_base_weights(name: str, base: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in base.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / name).write_bytes(b"{}")
    with pytest.raises(ConfigError, match=f"holds an adapter .{name}.*merge it"):
        train(config_of(tmp_path / "run", tree_of(directory)))
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_only_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "somewhere"})
    )
    with pytest.raises(ConfigError, match=r"holds an adapter .adapter_config\.json"):
        train(config_of(tmp_path / "run", tree_of(tmp_path / "adapter")))


def test_an_adapter_whose_weights_lead_nowhere(base: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in base.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "adapter_model.safetensors").symlink_to("../gone")
    with pytest.raises(ConfigError, match="holds an adapter"):
        train(config_of(tmp_path / "run", tree_of(directory)))


def test_an_adapters_tensors_among_the_models(base: Path, tmp_path: Path) -> None:
    """As a model is saved that still has its LoRA layers in it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.ones(2, 32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="tensors of an adapter among the model's"):
        train(config_of(tmp_path / "run", tree_of(directory)))


def test_an_adapter_in_a_folder_of_its_own_is_no_part_of_the_model(
    base: Path, tmp_path: Path
) -> None:
    """transformers does not look there either; it is not refused for the folder's sake."""
    directory = tmp_path / "model"
    (directory / "adapter").mkdir(parents=True)
    (directory / "adapter" / "adapter_config.json").write_text("{}")
    for file in base.iterdir():
        (directory / file.name).symlink_to(file)
    train(config_of(tmp_path / "run", tree_of(directory, train={"steps": 1, "threads": 1})))
