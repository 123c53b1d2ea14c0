"""Embeddings in ranges of rows: the bits of plain PyTorch, from the disk and through a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.ranges import DividedModel
from swaptrain.program.row_ranges import WHOLE
from tests.models.stored.test_pretrained import STILL, loaded, saved
from tests.support.divided import (
    assert_clipped_within_rounding,
    assert_plain_bits,
    assert_same_run,
    ranges_of,
    resumes_with_its_ranges,
)
from tests.support.matrix import proof_but
from tests.support.plain import PlainRuns
from tests.support.runs import (
    assert_same_bits,
    config_of,
    trained,
    weights,
)
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

UNTIED = {**LLAMA, "tie_word_embeddings": False}
BERT: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 500,
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "llama": (UNTIED, "text", 64),
    "bert": (BERT, "labelled_text", 500),
}
"""A head as large as the embedding, and none: with the rows of the table."""


def job(run_dir: Path, name: str, most: int | None, **sections: dict[str, Any]) -> Config:
    transformers.logging.set_verbosity_error()
    hf, data, _ = MODELS[name]
    tree: dict[str, Any] = {
        "model": {"hf": hf},
        "data": {"python": f"tests.support.datasets:{data}", "micro_batches": 2},
        "memory": {"segment": "8KiB", "rows": most},
        "train": {"steps": 2, "seed": 3, "threads": 1},
    }
    for section, fields in sections.items():
        tree[section] = {**tree.get(section, {}), **fields}
    return config_of(run_dir, tree)


@pytest.mark.parametrize(
    ("name", "most", "dtype"),
    proof_but(
        [(n, e, d) for n in MODELS for e in (1, 24, 63) for d in ("float32", "bfloat16")],
        ("bert", 24, "bfloat16"),
        whole=[("bert", 1, "float32"), ("bert", 1, "bfloat16")],
    ),
)
def test_embeddings_in_ranges_have_the_bits_of_plain_pytorch(
    name: str, most: int, dtype: str, tmp_path: Path, plain_runs: PlainRuns
) -> None:
    """Losses, and the weights under the names of the model."""
    config = job(tmp_path / "run", name, most, model={"dtype": dtype})
    plain = plain_runs.of(config)
    run_dir = trained(config)
    tables = [count for count in (MODELS[name][2], 32, 2) if name == "bert" or count == 64]
    assert len(ranges_of(run_dir)) == sum(-(-n // most) for n in tables if n > most)
    assert_plain_bits(run_dir, plain)


MODES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "lr": 1e-2, "momentum": 0.9}},
    "8bit": {"optimizer": {"state": "8bit"}},
    "rounded by chance": {
        "optimizer": {"state": "bfloat16"}, "model": {"dtype": "bfloat16", "master": "none"},
    },
    "parts": {"store": {"chunk": "8KiB"}},
    "groups": {"optimizer": {"groups": [{"match": ["*word_embeddings*"], "lr": 1e-3}]}},
    "frozen": {"train": {"freeze": ["*word_embeddings*"]}, "model": {"dtype": "bfloat16"}},
    "adapters": {
        "model": {"base": "nf4", "dtype": "bfloat16"},
        "lora": {"r": 4, "target_modules": ["query"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", proof_but(MODES, "frozen", whole=["sgd", "parts"]))
def test_a_run_in_ranges_equals_one_of_whole_embeddings(mode: str, tmp_path: Path) -> None:
    """However weights and moments are kept: a range of 244 rows has 7,808 numbers."""
    sections = {**MODES[mode], "memory": {"segment": "40KiB"}}
    whole = trained(job(tmp_path / "whole", "bert", None, **sections))
    sections["memory"] = {"segment": "40KiB", "rows": 256}
    divided = trained(job(tmp_path / "divided", "bert", 256, **sections))
    assert len(ranges_of(divided)) == 2
    assert_same_run(divided, whole)


@pytest.mark.parametrize("name", ["nadam", "adamw"])
def test_the_state_of_ranges_is_exported_as_that_of_the_whole(name: str, tmp_path: Path) -> None:
    """Numbers that an optimizer holds once for a parameter are the same for its ranges."""
    found = []
    for most in (None, 24):
        optimizer = {"name": name, "lr": 1e-2}
        run_dir = trained(job(tmp_path / f"run-{most}", "llama", most, optimizer=optimizer))
        file = tmp_path / f"state-{most}.safetensors"
        assert main(["export", str(run_dir), "--state", "--to", str(file)]) == 0
        found.append(load_file(file))
    assert_same_bits(found[1], found[0])


@pytest.mark.proof
@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["on it", "saves it"],
)
def test_an_adapter_is_that_of_a_whole_embedding(lora: dict[str, Any], tmp_path: Path) -> None:
    """Written by itself, and merged row by row."""
    found = []
    for most in (None, 24):
        config = job(tmp_path / f"run-{most}", "llama", most, lora={"r": 4, **lora})
        run_dir = trained(config)
        assert len(ranges_of(run_dir)) == (0 if most is None else 3)
        adapter, merged = tmp_path / f"adapter-{most}", tmp_path / f"merged-{most}"
        assert main(["export", str(run_dir), "--adapter", str(adapter)]) == 0
        assert main(["export", str(run_dir), "--merged", "--to", str(merged)]) == 0
        files = (adapter / "adapter_model.safetensors", merged / "model.safetensors")
        found.append([load_file(file) for file in files])
    for whole, divided in zip(*found, strict=True):
        assert_same_bits(divided, whole)


@pytest.mark.proof
def test_clipping_with_ranges_is_within_rounding(tmp_path: Path, plain_runs: PlainRuns) -> None:
    config = job(tmp_path / "run", "bert", 100, optimizer={"clip_norm": 0.3})
    assert_clipped_within_rounding(trained(config), plain_runs.of(config))


@pytest.mark.proof
def test_a_run_in_ranges_resumes_with_those_it_began_with(tmp_path: Path) -> None:
    """Killed between two ranges of the embedding."""
    text = "tests.support.datasets:labelled_text"
    evaluated = {"eval": {"python": text, "every": 1, "batches": 1}}
    resumes_with_its_ranges(
        lambda name, most: job(tmp_path / name, "bert", most, **evaluated), "rows", 100
    )


@pytest.mark.proof
def test_a_run_in_ranges_begins_from_a_checkpoint(tmp_path: Path) -> None:
    """The weights are those of from_pretrained."""
    directory = saved(UNTIED, tmp_path / "base")
    run_dir = trained(job(tmp_path / "run", "llama", 20, model={"hf": str(directory)}, **STILL))
    expected = {n: p.detach() for n, p in loaded(directory).named_parameters()}
    found = weights(run_dir)
    assert_same_bits({n: found[n] for n in expected}, expected)


def test_ranges_are_made_where_the_embedding_decides(tmp_path: Path) -> None:
    """Memory that a whole one does not fit: ranges as large as what else there is, or a segment."""
    hf = {**BERT, "vocab_size": 60_000}
    memory = {"segment": None, "host": "34MiB"}
    config = job(tmp_path / "run", "bert", None, memory=memory, model={"hf": hf})
    prepared = Prepared(config.resolved(), None, lambda _: None, draw=False)
    rows = prepared.plan.ranges.rows
    assert rows is not None and rows < 60_000
    ranges = [name for name in prepared.plan.captured.model.parameters if "[" in name]
    assert len(ranges) == -(-60_000 // rows)
    memory["host"] = "256MiB"
    config = job(tmp_path / "whole", "bert", None, memory=memory, model={"hf": hf})
    assert Prepared(config.resolved(), None, lambda _: None, draw=False).plan.ranges == WHOLE


def test_a_head_as_large_keeps_the_embedding_whole(tmp_path: Path) -> None:
    """Memory has to hold the head anyway."""
    config = job(tmp_path / "run", "llama", None, memory={"segment": "4KiB"}).resolved()
    prepared = Prepared(config, None, lambda _: None, draw=False)
    ranges = DividedModel(
        config, prepared.built, prepared.rules, lambda spec: 12 * spec.tensor.numel
    )
    assert ranges.fitting(1 << 10) == WHOLE


def test_a_head_that_decides_is_named(tmp_path: Path) -> None:
    """Fewer tokens would not help."""
    hf = {**UNTIED, "vocab_size": 64_000, "hidden_size": 128}
    memory = {"segment": None, "host": "40MiB"}
    config = job(tmp_path / "run", "llama", None, memory=memory, model={"hf": hf})
    with pytest.raises(BudgetError, match=r"lm_head\.weight alone decides: .*\(lora, or"):
        trained(config)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"hf": LLAMA}}, "no embedding that lookups alone read"),
        ({"optimizer": {"name": "adafactor"}}, "would not be updated as the whole"),
    ],
    ids=["tied", "no elementwise optimizer"],
)
def test_what_cannot_be_divided_is_said(tree: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(job(tmp_path / "run", "llama", 20, **tree))


@pytest.mark.parametrize(
    ("most", "message"),
    [(20, "no multiple of 8: set it to one"), (160, "set memory.rows to 256, or to null")],
)
def test_ranges_whose_codes_would_differ_are_refused(
    most: int, message: str, tmp_path: Path
) -> None:
    """Blocks of 256 numbers share a scale, and fewer than 4,096 numbers have none."""
    with pytest.raises(ConfigError, match=message):
        trained(job(tmp_path / "run", "bert", most, optimizer={"state": "8bit"}))


def test_a_tied_embedding_that_is_not_divided_is_named(tmp_path: Path) -> None:
    """Though the positions could be, of which there are as many as a range has."""
    hf = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
    model = {"hf": {**hf, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}}
    with pytest.raises(ConfigError, match=r"wte\.weight, with 64 rows, cannot be divided"):
        trained(job(tmp_path / "run", "llama", 32, model=model))


def test_a_range_that_decides_is_made_smaller(tmp_path: Path) -> None:
    """By the key that said how large it is."""
    hf = {**BERT, "vocab_size": 200_000}
    memory = {"segment": None, "host": "40MiB"}
    config = job(tmp_path / "run", "bert", 190_000, memory=memory, model={"hf": hf})
    with pytest.raises(BudgetError, match=r"or memory\.rows, which is 190000, to less"):
        trained(config)


class Bracketed(nn.Module):
    """A parameter with a name as of a range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.scales = nn.ParameterDict({"a[0:4]": nn.Parameter(torch.ones(4))})

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        found = self.table(input_ids).mean((1, 2)) * self.scales["a[0:4]"].sum()
        return (found - labels).square().mean()


def test_a_name_as_of_a_range_is_refused(tmp_path: Path) -> None:
    """Else an export would take it for one; without ranges it is a name like any other."""
    model = {"python": "tests.whole.test_embeddings:Bracketed", "hf": None}
    with pytest.raises(ConfigError, match=r"a\[0:4\] has the name of a range"):
        trained(job(tmp_path / "run", "bert", 32, model=model))
    run_dir = trained(job(tmp_path / "whole", "bert", None, model=model))
    assert "scales.a[0:4]" in weights(run_dir)
