"""`export RUN --to DIR`: what every tool of the ecosystem loads, by the names of the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from swaptrain.errors import ConfigError
from swaptrain.verbs.export import export_weights
from tests.models.stored.test_pretrained import BERT, MIXTRAL, MODELS, TEXT, loaded, saved
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, trained, weights
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains


def run_on(source: Path | dict[str, Any], run_dir: Path, data: str = TEXT, **sections: Any) -> Path:
    """Train from a directory, or from what a config draws; two steps."""
    hf = source if isinstance(source, dict) else str(source)
    model = {"hf": hf, **sections.pop("model", {})}
    tree = {"model": model, "data": {"python": data}, "train": {"steps": 2, "seed": 3}, **sections}
    return trained(config_of(run_dir, tree))


def stored(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory's files."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def by_its_names(directory: Path) -> dict[str, Tensor]:
    """Return the tensors that transformers loads, by the model's names."""
    return {name: tensor.detach() for name, tensor in loaded(directory).state_dict().items()}


@pytest.mark.parametrize("name", proof_but(MODELS, "mixtral", "bert"))
def test_a_checkpoint_comes_back_under_its_names(name: str, tmp_path: Path) -> None:
    """The same names and shapes; transformers loads the run's weights, and so does a new run."""
    fields, data = MODELS[name]
    base = saved(fields, tmp_path / "base")
    run_dir = run_on(base, tmp_path / "run", data)
    out = tmp_path / "out"
    export_weights(run_dir, out, None)
    before, after = stored(base), stored(out)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert any(not torch.equal(before[n], after[n]) for n in before)
    exact, again = weights(run_dir), by_its_names(out)
    assert_same_bits(exact, {n: again[n] for n in exact})
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["architectures"] == [type(loaded(base)).__name__]
    start = run_on(out, tmp_path / "again", data, train={"steps": 0, "seed": 9})
    assert_same_bits(weights(start), exact)


def test_experts_have_their_names_of_the_hub(tmp_path: Path) -> None:
    """One by one, also where no checkpoint says so."""
    run_dir = run_on(MIXTRAL, tmp_path / "run")
    out = tmp_path / "out"
    export_weights(run_dir, out, None)
    expected = saved(MIXTRAL, tmp_path / "base")
    assert stored(out).keys() == stored(expected).keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in stored(out)
    exact, again = weights(run_dir), by_its_names(out)
    assert_same_bits(exact, {n: again[n] for n in exact})


def test_what_is_not_trained_is_carried_over(tmp_path: Path) -> None:
    """An encoder with a pooler, trained with a head: the encoder loads as it was saved."""
    plain = {**BERT, "architectures": ["BertModel"]}
    config = transformers.BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"})
    torch.manual_seed(5)
    transformers.BertModel(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(plain))
    (tmp_path / "base" / "1_Pooling").mkdir()
    (tmp_path / "base" / "1_Pooling" / "config.json").write_text("{}")
    run_dir = run_on(tmp_path / "base", tmp_path / "run", model={"architecture": "BertForMaskedLM"})
    out = tmp_path / "out"
    export_weights(run_dir, out, None)
    before, after = stored(tmp_path / "base"), stored(out)
    assert (out / "1_Pooling" / "config.json").read_text() == "{}"
    assert before.keys() < after.keys()
    assert torch.equal(after["pooler.dense.weight"], before["pooler.dense.weight"])
    _, report = transformers.BertModel.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    _, report = transformers.BertForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]


def test_what_a_checkpoint_holds_twice_goes_out_once(tmp_path: Path) -> None:
    """A tied weight under its own name, and no old value of a trained one."""
    base = saved(LLAMA, tmp_path / "base")
    tensors = stored(base)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()  # the same place, without prefix
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    run_dir = run_on(base, tmp_path / "run")
    export_weights(run_dir, tmp_path / "out", None)
    found = stored(tmp_path / "out")
    assert "model.embed_tokens.weight" in found
    assert (
        len([name for name in found if name.endswith("norm.weight") and "layers" not in name]) == 1
    )
    exact, again = weights(run_dir), by_its_names(tmp_path / "out")
    assert_same_bits(exact, {n: again[n] for n in exact})


def test_a_checkpoint_that_is_another_one_is_refused(tmp_path: Path) -> None:
    """Its names would be wrong; weights that came after the run began are none of its own."""
    base = saved(LLAMA, tmp_path / "base")
    run_dir = run_on(base, tmp_path / "run", train={"steps": 0})
    saved({**LLAMA, "num_hidden_layers": 2}, tmp_path / "other")
    for file in ("model.safetensors",):
        (tmp_path / "other" / file).replace(base / file)
    with pytest.raises(ConfigError, match="are not those that the run began from, and the names"):
        export_weights(run_dir, tmp_path / "out", None)
    (base / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="are not those that the run began from"):
        export_weights(run_dir, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
    drawn = run_on(base, tmp_path / "drawn", train={"steps": 0})
    saved(BERT, tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").replace(base / "model.safetensors")
    export_weights(drawn, tmp_path / "out", None)
    assert stored(tmp_path / "out").keys() == weights(drawn).keys()


def test_a_carried_tensor_that_has_changed_is_refused(tmp_path: Path) -> None:
    """It would be of another model than the rest."""
    config = transformers.BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"})
    base = tmp_path / "base"
    transformers.BertModel(config).save_pretrained(base)
    model = {"architecture": "BertForMaskedLM"}
    run_dir = run_on(base, tmp_path / "run", model=model, train={"steps": 0})
    tensors = stored(base)
    tensors["pooler.dense.weight"] += 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"pooler\.dense\.\w+, which is not trained, would be"):
        export_weights(run_dir, tmp_path / "out", None)


def test_the_dtype_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Or the one that is asked for; the largest file is as asked too."""
    base = saved(LLAMA, tmp_path / "base", dtype=torch.bfloat16)
    run_dir = run_on(base, tmp_path / "run")
    export_weights(run_dir, tmp_path / "as it was", None)
    export_weights(run_dir, tmp_path / "half", "float16", shard_bytes=20_000)
    exact = weights(run_dir)
    found = stored(tmp_path / "as it was")
    assert_same_bits(found, {name: exact[name].bfloat16() for name in found})
    assert_same_bits(stored(tmp_path / "half"), {name: exact[name].half() for name in found})
    assert len(list((tmp_path / "half").glob("model-*.safetensors"))) > 1
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == exact.keys()
    assert index["metadata"]["total_size"] == sum(2 * t.numel() for t in exact.values())


def test_the_state_of_the_optimizer_goes_with_it(tmp_path: Path) -> None:
    """Moments under the parameters' names, in a directory and in a file; weights load as ever."""
    base = saved({**LLAMA, "tie_word_embeddings": False}, tmp_path / "base")
    run_dir = run_on(base, tmp_path / "run")
    export_weights(run_dir, tmp_path / "out", None, state=True)
    export_weights(run_dir, tmp_path / "all.safetensors", None, state=True)
    found = load_file(tmp_path / "out" / "optimizer.safetensors")
    whole = load_file(tmp_path / "all.safetensors")
    exact = weights(run_dir)
    assert int(found.pop("step")) == 2
    kinds = ("exp_avg", "exp_avg_sq")
    assert found.keys() == {f"{name}.{kind}" for name in exact for kind in kinds}
    assert all(t.shape == exact[name.rpartition(".")[0]].shape for name, t in found.items())
    assert_same_bits({n: whole[f"optimizer.{n}"] for n in found}, found)
    assert any((t > 0).any() for t in found.values())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="--state belongs to the run's own weights"):
        export_weights(run_dir, tmp_path / "adapter", None, form="adapter", state=True)


def test_numbers_that_float16_has_not_are_refused(tmp_path: Path) -> None:
    """Not written as infinity, and no directory is left."""
    base = saved(LLAMA, tmp_path / "base")
    tensors = stored(base)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    run_dir = run_on(base, tmp_path / "run", train={"steps": 0})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has numbers beyond 65,504"):
        export_weights(run_dir, tmp_path / "out", "float16")
    assert sorted(path.name for path in tmp_path.glob("out*")) == []


def test_a_carried_number_that_float16_has_not_is_refused(tmp_path: Path) -> None:
    """What is not trained is looked at too."""
    config = transformers.BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"})
    transformers.BertModel(config).save_pretrained(tmp_path / "base")
    tensors = stored(tmp_path / "base")
    tensors["pooler.dense.bias"][0] = 1e6
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    model = {"architecture": "BertForMaskedLM"}
    run_dir = run_on(tmp_path / "base", tmp_path / "run", model=model, train={"steps": 0})
    with pytest.raises(ConfigError, match=r"pooler\.dense\.bias has numbers beyond 65,504"):
        export_weights(run_dir, tmp_path / "out", "float16")


def test_a_place_where_nothing_can_be_renamed_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is mounted there, or a directory of somebody else's; a file is written in it."""
    run_dir = run_on(LLAMA, tmp_path / "run")
    mounted, others = tmp_path / "mounted", tmp_path / "others"
    mounted.mkdir(), others.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mounted)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != others)
    for to in (mounted, others / "out"):
        with pytest.raises(ConfigError, match="renamed, which cannot be done there: name a new"):
            export_weights(run_dir, to, None)
    export_weights(run_dir, mounted / "out", None)
    assert [path.name for path in mounted.iterdir()] == ["out"] and not any(others.iterdir())


def test_what_is_no_model_of_the_hub_is_refused(tmp_path: Path) -> None:
    """A function's model has no config.json; adapters have two forms, and both are named."""
    run_dir = run_on(LLAMA, tmp_path / "adapters", lora={"r": 2, "target_modules": ["q_proj"]})
    with pytest.raises(ConfigError, match=r"give --merged --to DIR .* or --adapter DIR"):
        export_weights(run_dir, tmp_path / "out", None)
    tree = {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        "train": {"steps": 1},
    }
    run_dir = trained(config_of(tmp_path / "function", tree))
    with pytest.raises(ConfigError, match=r"name a file that ends in \.safetensors"):
        export_weights(run_dir, tmp_path / "out", None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    run_dir = run_on(LLAMA, tmp_path / "run", train={"steps": 0})
    with pytest.raises(ConfigError, match="it exists and is not empty"):
        export_weights(run_dir, tmp_path / "full", None)
