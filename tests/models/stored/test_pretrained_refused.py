"""Checkpoints that no run begins from: each refusal, and that nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swaptrain.errors import ConfigError
from swaptrain.verbs.train import train
from tests.models.stored.test_pretrained import saved, split_in_two, tree_of
from tests.support.matrix import every
from tests.support.runs import config_of
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _widen(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(33)


def _untie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def _quantise(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


def _narrow(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def _rename(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"other.{name}"] = tensors.pop(name)


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "lacks one": (_drop, r"lacks 1 of the \d+ tensors of LlamaForCausalLM: model.layers.1.mlp.up"),
    "another's": (_rename, r"lacks \d+ of the \d+ .* and \d+ more; it is another model's"),
    "shape": (_widen, r"model.norm.weight has the shape \(33,\) in .* and \(32,\) in the model"),
    "tied": (_untie, "different values of .*: set tie_word_embeddings to false"),
    "int8": (_quantise, "is stored in I8: swaptrain trains weights of 16 bits and more"),
    "fp8": (_narrow, "is stored in F8_E4M3: swaptrain trains weights of 16 bits and more"),
}


def _spoilt(damage: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    """Return what does to a checkpoint's file what `damage` does to its tensors."""

    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        damage(tensors)
        save_file(tensors, directory / "model.safetensors")

    return spoil


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _lose_a_part(directory: Path) -> None:
    split_in_two(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def _lead_out(directory: Path) -> None:
    split_in_two(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


def _no_index(directory: Path) -> None:
    split_in_two(directory)
    (directory / "model.safetensors.index.json").write_text("{")


def _other_name(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "weights.safetensors")


def _pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _gguf(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model.gguf")


def _adapters(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")


def _dangling(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("../blobs/gone")


def _nested(directory: Path) -> None:
    split_in_two(directory)
    (directory / "model.safetensors.index.json").write_text("[" * 100_000)


def _claim_a_long_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])


def _no_float(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rms_norm_eps": {"__float__": [1]}}))


def _quantised(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (_cut, "cannot read .*model.safetensors: .* fetch it again"),
    "part": (_lose_a_part, r"00002.safetensors is no file .* 1 of its 2 files are there"),
    "outside": (_lead_out, "which is not beside it"),
    "index": (_no_index, "cannot read .*model.safetensors.index.json"),
    "name": (_other_name, "holds weights.safetensors, but neither model.safetensors nor"),
    "pickled": (_pickled, r"swaptrain never reads \(pytorch_model.bin; what is pickled"),
    "gguf": (_gguf, r"swaptrain never reads \(model.gguf"),
    "adapters": (_adapters, "holds an adapter .adapter_model.safetensors.,.* merge it"),
    "quantised": (_quantised, "are quantised"),
    "length": (_claim_a_long_header, "cannot read .*model.safetensors: .* fetch it again"),
    "float": (_no_float, "cannot read .*config.json"),
    "dangling": (_dangling, "model.safetensors leads to nothing: fetch it again"),
    "nested": (_nested, "cannot read .*model.safetensors.index.json: RecursionError"),
}


REFUSED = {
    **{name: (_spoilt(damage), message) for name, (damage, message) in TENSORS.items()},
    **FILES,
}


@pytest.mark.parametrize("name", every(4, REFUSED))
def test_what_cannot_be_begun_from_is_refused(name: str, tmp_path: Path) -> None:
    """Each refusal says which tensor or file, and what to do, and nothing is written."""
    damage, message = REFUSED[name]
    directory = saved(LLAMA, tmp_path / "checkpoint")
    damage(directory)
    with pytest.raises(ConfigError, match=message):
        train(config_of(tmp_path / "run", tree_of(directory)))
    assert not (tmp_path / "run").exists()
