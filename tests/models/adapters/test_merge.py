"""Merged adapters: tied weights that part, and large weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.models.adapters.lora import inject
from swaptrain.models.adapters.merge import (
    merge_records,
    merged_weight,
    plain_names,
    untied_names,
)
from swaptrain.models.hub_names import HubNames
from swaptrain.models.quantization import to_numpy
from swaptrain.store.format.root import create_root, read_root
from swaptrain.verbs.export import export_weights
from tests.models.stored.test_pretrained import BERT, saved
from tests.support.matrix import proof_but
from tests.support.runs import config_of, trained
from tests.whole.test_exactness import LLAMA, T5

TIED = {**LLAMA, "tie_word_embeddings": True}
PARTED: dict[str, dict[str, Any]] = {
    "table trained": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head trained": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both trained": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "head adapted": {"target_modules": ["q_proj", "lm_head"]},
    "table adapted": {"target_modules": ["q_proj", "embed_tokens"]},
}

pytestmark = [
    pytest.mark.trains,
    # PEFT's own: of adapters on tied weights, and of its use of transformers.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a model whose head is its table of embeddings."""
    return saved(TIED, tmp_path_factory.mktemp("merge") / "tied")


def run_of(folder: Path, hf: Any, section: dict[str, Any]) -> Path:
    tree = {
        "model": {"hf": hf if isinstance(hf, dict) else str(hf)},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **section},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 2},
    }
    return trained(config_of(folder, tree))


@pytest.mark.parametrize("kind", proof_but([*PARTED], "table trained"))
def test_a_merged_model_computes_what_was_trained_where_tied_weights_part(
    kind: str, tied: Path, tmp_path: Path
) -> None:
    """What an adapter changes under one name stays as it was under the other."""
    run_dir = run_of(tmp_path / "run", tied, PARTED[kind])
    export_weights(run_dir, tmp_path / "adapter", None, form="adapter")
    export_weights(run_dir, tmp_path / "merged", None, form="merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(tied)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(12)[None] % 64
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits)
    assert not json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    if "adapted" in kind:  # PEFT adds to both names of one weight
        return
    expected = adapted.merge_and_unload().state_dict()
    state = merged.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("drawn", [False, True])
def test_tied_weights_that_no_adapter_changes_stay_tied(
    drawn: bool, tied: Path, tmp_path: Path
) -> None:
    run_dir = run_of(tmp_path / "run", TIED if drawn else tied, {"target_modules": ["q_proj"]})
    export_weights(run_dir, tmp_path / "merged", None, form="merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


@pytest.mark.proof
def test_of_a_drawn_base_and_to_a_file_each_name_has_its_weight(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", TIED, PARTED["table trained"])
    export_weights(run_dir, tmp_path / "merged", None, form="merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    file = tmp_path / "merged.safetensors"
    export_weights(run_dir, file, None, form="merged")
    tensors = load_file(file)
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    for name, value in merged.state_dict().items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.proof
def test_names_that_a_class_always_ties_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """Of T5 the key that unties them also says how outputs are scaled. A file has all names."""
    section = {"target_modules": ["q"], "modules_to_save": ["lm_head"]}
    run_dir = run_of(tmp_path / "run", T5, section)
    with pytest.raises(
        ConfigError, match=r"T5ForConditionalGeneration ties .* whatever its config"
    ):
        export_weights(run_dir, tmp_path / "merged", None, form="merged")
    assert not (tmp_path / "merged").exists()
    file = tmp_path / "merged.safetensors"
    export_weights(run_dir, file, None, form="merged")
    tensors = load_file(file)
    assert not torch.equal(tensors["lm_head.weight"], tensors["shared.weight"])
    assert torch.equal(tensors["encoder.embed_tokens.weight"], tensors["shared.weight"])


LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(1003, 4099, bias=False),
    "conv1d": lambda: Conv1D(1003, 4099),
    "embedding": lambda: nn.Embedding(4099, 1003),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dora", [False, True])
def test_a_weight_of_millions_of_elements_has_the_bits_of_peft(
    kind: str, dtype: str, dora: bool
) -> None:
    """Its product with rows that come in parts may have others."""
    torch.manual_seed(0)
    holder = nn.ModuleDict({"layer": LAYERS[kind]().to(getattr(torch, dtype))})
    fields = {"r": 4, "lora_alpha": 6, "target_modules": ["layer"], "init_lora_weights": False}
    inject(holder, {**fields, "use_dora": dora})
    (record,) = merge_records(holder)
    layer: Any = holder["layer"]
    for name, parameter in layer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # as PEFT has them on a base of 16 bits
    weight = layer.base_layer.weight.detach().clone()
    exact = {name: value.clone() for name, value in holder.state_dict().items()}
    layer.merge()
    merged = merged_weight(
        record, {"use_rslora": False, "use_dora": dora}, weight, exact.__getitem__
    )
    expected = to_numpy(layer.base_layer.weight.detach())
    assert merged.tobytes() == expected.tobytes()


def test_a_record_of_a_weight_that_is_not_there_is_damage(tmp_path: Path) -> None:
    """An adapter that would be left out of the merged model."""
    run_dir = run_of(tmp_path / "run", TIED, {"target_modules": ["q_proj"]})
    root = read_root(run_dir)
    assert root is not None and root.adapter is not None
    first = root.adapter.merges[0]
    merges = (first.model_copy(update={"weight": "elsewhere.weight"}), *root.adapter.merges[1:])
    adapter = root.adapter.model_copy(update={"merges": merges})
    create_root(run_dir, root.model_copy(update={"adapter": adapter}))
    with pytest.raises(DamagedStoreError, match=r"no weight elsewhere\.weight, which an adapter"):
        export_weights(run_dir, tmp_path / "merged.safetensors", None, form="merged")
    assert not (tmp_path / "merged.safetensors").exists()


class Shared(nn.Module):
    """One layer under three names."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict({"lin": nn.Linear(8, 8)})
        self.blocks = nn.ModuleList([block, block, block])


def test_a_module_of_several_names_stays_one() -> None:
    module = Shared()
    inject(module, {"r": 2, "target_modules": ["lin"]})
    assert untied_names(module) is None
    names = plain_names(module)
    assert {names[f"blocks.{n}.lin.base_layer.weight"] for n in range(3)} == {
        f"blocks.{n}.lin.weight" for n in range(3)
    }
    assert {plain for name, plain in names.items() if "lora_" in name} == {None}


@pytest.mark.proof
def test_tied_tensors_of_a_head_are_saved_under_all_their_names(tmp_path: Path) -> None:
    """A head of BERT has its bias twice; PEFT loads neither without the other."""
    base = saved(BERT, tmp_path / "base")
    section = {"target_modules": ["query"], "modules_to_save": ["cls"]}
    run_dir = run_of(tmp_path / "run", base, section)
    export_weights(run_dir, tmp_path / "adapter", None, form="adapter")
    model = transformers.BertForMaskedLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    export_weights(run_dir, tmp_path / "merged", None, form="merged")
    merged = transformers.BertForMaskedLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(12)[None] % 64
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits)
    again = {"model": {"hf": str(base)}, "lora": {"from": str(tmp_path / "adapter")}}
    tree = {**again, "data": {"python": "tests.support.datasets:text"}, "train": {"steps": 1}}
    trained(config_of(tmp_path / "again", tree))


def test_an_adapter_inside_of_what_is_trained_in_full_is_refused() -> None:
    module = nn.ModuleDict({"lm_head": nn.TransformerEncoderLayer(8, 2)})
    with pytest.raises(ConfigError, match=r"lm_head is trained in full, and .*linear1 in it"):
        inject(module, {"r": 2, "target_modules": ["linear1"], "modules_to_save": ["head"]})


def test_a_model_of_several_configs_says_in_each_that_nothing_is_tied(tmp_path: Path) -> None:
    tree = {
        "model": {
            "hf": {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 32,
                    "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "head_dim": 8,
                },
                "vision_config": {
                    "model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 28,
                    "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
                    "patch_size": 14,
                },
            },
        },
        "data": {"python": "tests.support.datasets:text"},
    }  # fmt: skip
    config = config_of(tmp_path / "run", tree)
    names = HubNames(config, "Gemma3ForConditionalGeneration", None, is_untied=True)
    assert "" in names.untied
