"""Runs that begin from a checkpoint: the bits of from_pretrained, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from swaptrain.data import open_data
from swaptrain.errors import ConfigError
from swaptrain.reference import train_reference
from swaptrain.run import open_run
from swaptrain.store.check.verify import Verifier
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.slots.slots import Slots
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.inspection.report import read_run
from swaptrain.verbs.train import train
from tests.capture.test_draws import draws_of
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights
from tests.whole.test_exactness import GPT2, LLAMA, T5

pytestmark = pytest.mark.trains

MIXTRAL: dict[str, Any] = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": True,
    "architectures": ["BertForMaskedLM"],
}  # fmt: skip
RESNET: dict[str, Any] = {
    "model_type": "resnet", "num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 16],
    "depths": [1, 1], "layer_type": "basic", "num_labels": 10,
}  # fmt: skip
TEXT = "tests.support.datasets:text"
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({**LLAMA, "tie_word_embeddings": False}, TEXT),
    "llama-tied": (LLAMA, TEXT),
    "gpt2": (GPT2, TEXT),
    "t5": (T5, TEXT),
    "bert": (BERT, TEXT),
    "mixtral": (MIXTRAL, TEXT),
    "resnet": (RESNET, "tests.support.datasets:pictures"),
}
EXACT_IN_FLOAT32 = [name for name in MODELS if name != "mixtral"]


def saved(
    fields: dict[str, Any], to: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Save a model with weights that no seed of a run gives, as its users would; return `to`."""
    fields = dict(fields)
    config = transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields)
    torch.manual_seed(1234)
    model = _class_of(config)(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.05)
    model.to(dtype).save_pretrained(to, **options)
    return to


def _class_of(config: Any) -> Any:
    if config.architectures:
        return getattr(transformers, config.architectures[0])
    for auto in ("AutoModelForCausalLM", "AutoModelForImageClassification"):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise AssertionError(f"no class for {config.model_type}")


def loaded(directory: Path) -> nn.Module:
    """Return the model as plain PyTorch's users load it."""
    config = transformers.AutoConfig.from_pretrained(directory)
    config.use_cache = False
    model: nn.Module = getattr(transformers, config.architectures[0]).from_pretrained(
        directory, config=config, dtype=torch.float32
    )
    return model


def split_in_two(directory: Path) -> None:
    """Save a checkpoint of one file as two with an index, every second tensor in the second."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )


def tree_of(directory: Path, data: str = TEXT, **sections: Any) -> dict[str, Any]:
    return {"model": {"hf": str(directory)}, "data": {"python": data}, **sections}


STILL: dict[str, Any] = {
    "optimizer": {"name": "sgd", "lr": 1e-300, "weight_decay": 0.0},
    "train": {"steps": 1, "seed": 3, "threads": 1},
}
"""A run whose weights at the end are those that it began with: the rate is none in float32."""


@pytest.mark.parametrize("name", proof_but(EXACT_IN_FLOAT32, "llama"))
def test_training_on_equals_plain_pytorch(name: str, tmp_path: Path) -> None:
    """All losses and final weights are those of from_pretrained and a plain loop, bit for bit."""
    fields, data = MODELS[name]
    directory = saved(fields, tmp_path / "checkpoint")
    config = config_of(tmp_path / "run", tree_of(directory, data, memory={"segment": "16KiB"}))
    run_dir = trained(config)
    batches = open_data(
        config.data, seed=3, run_dir=tmp_path / "plain", model_vocabulary=fields.get("vocab_size")
    )
    plain = train_reference(
        lambda: loaded(directory),
        batches.batch,
        steps=5,
        micro_batches=3,
        lr=1e-2,
        weight_decay=0.1,
        arguments=config.resolved().optimizer.arguments,
    )
    assert losses(run_dir) == plain.losses
    stored = weights(run_dir)
    tensors = {**plain.buffers, **plain.parameters}
    assert_same_bits(stored, {name: tensors[name] for name in stored})


@pytest.mark.parametrize(
    ("name", "stored", "dtype"),
    proof_but(
        [
            *((name, torch.float32, "float32") for name in MODELS),
            *((name, torch.bfloat16, "bfloat16") for name in MODELS),
            ("llama", torch.float16, "float32"),
            ("llama", torch.float16, "bfloat16"),
        ],
        ("gpt2", torch.float32, "float32"),
        ("llama", torch.float16, "bfloat16"),
    ),
)
def test_the_masters_are_what_is_stored(
    name: str, stored: torch.dtype, dtype: str, tmp_path: Path
) -> None:
    """Every weight begins as from_pretrained in float32 gives it, of one file and of several."""
    fields, data = MODELS[name]
    directory = saved(fields, tmp_path / "checkpoint", dtype=stored)
    if name != "gpt2":
        split_in_two(directory)
    tree = tree_of(directory, data, **STILL)
    tree["model"]["dtype"] = dtype
    found = weights(trained(config_of(tmp_path / "run", tree)))
    expected = dict(loaded(directory).named_parameters())
    assert_same_bits(
        {name: found[name] for name in expected}, {n: p.detach() for n, p in expected.items()}
    )


def _lose_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _spoil(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"no weights")


@pytest.mark.proof
@pytest.mark.parametrize("damage", [_lose_all, _spoil])
def test_a_run_goes_on_without_its_checkpoint(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are needed once: then config.json is enough, and constant buffers are kept.

    None of the constructor's are drawn, neither at first nor later.
    """
    draws = draws_of(monkeypatch)
    fields, data = MODELS["resnet"]
    directory = saved(fields, tmp_path / "checkpoint")
    whole = trained(config_of(tmp_path / "whole", tree_of(directory, data)))
    train(config_of(tmp_path / "run", tree_of(directory, data, train={"steps": 2})))
    damage(directory)
    train(config_of(tmp_path / "run", tree_of(directory, data)))
    assert draws == [False, False, False]
    assert losses(tmp_path / "run") == losses(whole)
    assert_same_bits(weights(tmp_path / "run"), weights(whole))


@pytest.mark.proof
@pytest.mark.parametrize("name", ["llama-tied", "bert", "mixtral", "resnet"])
def test_what_an_export_writes_is_begun_from(name: str, tmp_path: Path) -> None:
    """The export of a run, named model.safetensors beside its config.json, begins the next.

    transformers loads it too.
    """
    fields, data = MODELS[name]
    directory = saved(fields, tmp_path / "checkpoint")
    run_dir = trained(config_of(tmp_path / "run", tree_of(directory, data)))
    assert read_run(run_dir).origin == str(directory)
    next_one = tmp_path / "next"
    next_one.mkdir()
    shutil.copy(directory / "config.json", next_one)
    export_weights(run_dir, next_one / "model.safetensors", "float32")
    trained_weights = weights(run_dir)
    parameters = {n: p.detach() for n, p in loaded(next_one).named_parameters()}
    assert_same_bits(parameters, {n: trained_weights[n] for n in parameters})
    found = weights(trained(config_of(tmp_path / "second", tree_of(next_one, data, **STILL))))
    assert_same_bits({n: found[n] for n in parameters}, parameters)


@pytest.mark.proof
def test_a_head_that_is_not_there_is_the_constructors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body's weights without the head: the head begins at random, and the run says so."""
    directory = saved(MODELS["llama"][0], tmp_path / "checkpoint")
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["another.weight"] = torch.zeros(3)
    # The names of the body alone, as LlamaModel saves it.
    body = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(body, directory / "model.safetensors")
    draws = draws_of(monkeypatch)
    run_dir = trained(config_of(tmp_path / "run", tree_of(directory, **STILL)))
    assert draws == [False, True]
    said = capsys.readouterr().out
    assert f"{directory} has no lm_head.weight: they begin as the constructor makes them" in said
    assert "holds what LlamaForCausalLM has no place for, or twice: another.weight" in said
    found = weights(run_dir)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[name], tensors[name])
    # Another run under the same seed, of the config.json alone, has the same head.
    (directory / "model.safetensors").unlink()
    plain = weights(trained(config_of(tmp_path / "plain", tree_of(directory, **STILL))))
    assert torch.equal(found["lm_head.weight"], plain["lm_head.weight"])
    assert not torch.equal(found[name], plain[name])


def test_a_creation_that_was_cut_short_keeps_no_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while its first weights were written, a run does not mix them with another file's."""
    directory = saved(LLAMA, tmp_path / "checkpoint")
    tree = tree_of(directory, memory={"segment": "16KiB"}, **STILL)
    switch = Slots.switch

    def cut_short(self: Slots, k: int, *args: Any, **options: Any) -> None:
        if k == 3:
            raise KeyboardInterrupt
        switch(self, k, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "switch", cut_short)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(tmp_path / "run", tree))
    assert (tmp_path / "run/store/segments/001").is_symlink()
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, directory / "new")
    (directory / "new").replace(directory / "model.safetensors")
    found = weights(trained(config_of(tmp_path / "run", tree)))
    assert_same_bits(found, {name: tensors[name] + 1 for name in found})


@pytest.mark.proof
def test_a_file_that_changes_while_it_is_read_is_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced in the middle of the first weights, it is refused; then the run begins from it."""
    directory = saved(LLAMA, tmp_path / "checkpoint")
    tree = tree_of(directory, memory={"segment": "16KiB"}, **STILL)
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "new")
    switch = Slots.switch

    def replaced(self: Slots, k: int, *args: Any, **options: Any) -> None:
        if k == 2 and (tmp_path / "new").exists():
            (tmp_path / "new").replace(directory / "model.safetensors")
        switch(self, k, *args, **options)

    monkeypatch.setattr(Slots, "switch", replaced)
    with pytest.raises(ConfigError, match="has changed while it was being read"):
        train(config_of(tmp_path / "run", tree))
    found = weights(trained(config_of(tmp_path / "run", tree)))
    assert_same_bits(found, {name: tensors[name] + 1 for name in found})


@pytest.mark.proof
def test_a_run_that_begins_anew_from_the_constructor_does_not_name_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short before anything was written, and the weights taken away."""
    directory = saved(LLAMA, tmp_path / "checkpoint")
    config = config_of(tmp_path / "run", tree_of(directory, **STILL))

    def cut_short(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(open_run, "open_store", cut_short)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert read_run(config.run.dir).origin == str(directory)
    (directory / "model.safetensors").unlink()
    assert read_run(trained(config)).origin is None


def test_a_damaged_record_of_the_checkpoint_stops_nothing(tmp_path: Path) -> None:
    """It says where weights came from, and nothing that trains depends on it."""
    directory = saved(LLAMA, tmp_path / "checkpoint")
    run_dir = trained(config_of(tmp_path / "run", tree_of(directory, **STILL)))
    path = run_dir / "initial-weights.json"
    path.write_bytes(path.read_bytes().replace(b"files", b"fires"))
    assert read_run(run_dir).origin == "unknown: initial-weights.json does not verify"
    with DirectIO(1) as io:
        result = Verifier(run_dir, io).verify()
    assert not result.findings
    assert any("initial-weights.json" in note for note in result.notes)


def test_checkpoints_lie_where_the_hub_keeps_them(tmp_path: Path) -> None:
    """Its cache has links to files of other names, one directory up and down again."""
    directory = saved(LLAMA, tmp_path / "checkpoint")
    split_in_two(directory)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(directory.iterdir())):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        file.rename(tmp_path / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    found = weights(trained(config_of(tmp_path / "run", tree_of(snapshot, **STILL))))
    expected = {name: p.detach() for name, p in loaded(snapshot).named_parameters()}
    assert_same_bits(found, expected)


@pytest.mark.proof
def test_a_pooler_that_is_not_there_is_the_constructors(tmp_path: Path) -> None:
    """What a masked language model was trained without begins at random in a classifier."""
    directory = saved(BERT, tmp_path / "checkpoint")
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), "architectures": ["BertForSequenceClassification"]}
    path.write_text(json.dumps({**fields, "tie_word_embeddings": False}))
    tree = tree_of(directory, "tests.support.datasets:labelled_text", **STILL)
    found = weights(trained(config_of(tmp_path / "run", tree)))
    stored = load_file(directory / "model.safetensors")
    shared = {name: tensor for name, tensor in found.items() if name in stored}
    assert len(shared) > 20 and "bert.pooler.dense.weight" in found.keys() - shared.keys()
    assert_same_bits(shared, {name: stored[name] for name in shared})


def test_pickles_beside_safetensors_are_passed_over(tmp_path: Path) -> None:
    """Directories often hold both: the safetensors are read, the pickle is not."""
    directory = saved(LLAMA, tmp_path / "checkpoint")
    (directory / "pytorch_model.bin").write_bytes(b"not read")
    expected = load_file(directory / "model.safetensors")
    found = weights(trained(config_of(tmp_path / "run", tree_of(directory, **STILL))))
    assert_same_bits(found, {name: expected[name] for name in found})
