"""`model.base`: a base of codes trains adapters as its decoded weights do, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from swaptrain.data import open_data
from swaptrain.errors import ConfigError, NotFiniteError
from swaptrain.models.quantized_base import quantizable
from swaptrain.reference import train_reference
from swaptrain.store.format.root import read_root
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.inspect import inspect_run
from swaptrain.verbs.plan import plan, print_plan
from swaptrain.verbs.train import train
from tests.models.adapters.test_lora import MODELS, UNTIED, VARIANTS, lora_config
from tests.models.stored.test_pretrained import loaded, saved
from tests.support.matrix import matrix, proof_but
from tests.support.plain import PlainRuns
from tests.support.runs import (
    adapted,
    assert_same_bits,
    assert_same_state,
    config_of,
    losses,
    quantized,
    rows,
    trained,
    weights,
)

FORMS = ["int8", "nf4"]
DTYPES = ["float32", "bfloat16"]
pytestmark = [
    pytest.mark.trains,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT's own
]


@pytest.mark.parametrize(
    ("model", "form", "variant", "dtype"), matrix(MODELS, FORMS, VARIANTS, DTYPES, by_pairs=False)
)
def test_the_bits_of_its_decoded_weights(
    model: str, form: str, variant: str, dtype: str, tmp_path: Path, plain_runs: PlainRuns
) -> None:
    """Losses and all weights; what an export gives of the base is what was computed with."""
    tree = {**VARIANTS[variant], "model": {"dtype": dtype, "base": form}}
    config = lora_config(tmp_path, model, **tree)
    run_dir = trained(config)
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    assert_same_state(weights(run_dir), plain)
    root = read_root(run_dir)
    assert root is not None and root.quantized
    assert {record.form for record in root.quantized.values()} == {form}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(UNTIED, tmp_path_factory.mktemp("quantized") / "base", dtype=torch.bfloat16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_from_a_checkpoint_to_peft(kind: str, form: str, base: Path, tmp_path: Path) -> None:
    """DoRA begins from the decoded weights; the merge is PEFT's of the decoded base."""
    section = {"r": 4, "target_modules": ["q_proj", "up_proj"], "use_dora": kind == "dora"}
    tree = {
        "model": {"hf": str(base), "dtype": "bfloat16", "base": form},
        "data": {"python": "tests.support.datasets:text"},
        "memory": {"segment": "16KiB"},
        "lora": section,
    }
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    data = open_data(config.data, seed=3, run_dir=tmp_path / "plain", model_vocabulary=64)
    plain = train_reference(
        lambda: adapted(lambda: quantized(lambda: loaded(base), config), section, 3),
        data.batch,
        steps=5,
        micro_batches=3,
        seed=3,
        lr=1e-2,
        weight_decay=0.1,
        dtype=torch.bfloat16,
    )
    assert losses(run_dir) == plain.losses
    assert_same_state(weights(run_dir), plain)

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    export_weights(run_dir, adapter, None, form="adapter")
    export_weights(run_dir, merged, None, form="merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    decoded = quantized(lambda: model, config)
    theirs = peft.PeftModel.from_pretrained(decoded, adapter).merge_and_unload()
    ours = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert_same_bits(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("form", FORMS)
def test_frozen_weights_of_a_plain_run(form: str, tmp_path: Path, plain_runs: PlainRuns) -> None:
    """Without adapters: the lower layers lie as codes, but for one that is excepted."""
    tree = {
        "model": {
            "hf": UNTIED,
            "base": form,
            "base_except": ["model.layers.0.self_attn.*"],
        },
        "data": {"python": "tests.support.datasets:text"},
        "memory": {"segment": "16KiB"},
        "train": {"freeze": ["model.embed_tokens*", "model.layers.[01].*"]},
    }
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    assert_same_state(weights(run_dir), plain)
    root = read_root(run_dir)
    assert root is not None
    frozen = {name.rpartition(".weight")[0] for name in root.quantized}
    parts = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    attention = (f"self_attn.{name}_proj" for name in "qkvo")
    expected = {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    assert frozen == expected | {f"model.layers.1.{part}" for part in attention}


@pytest.mark.parametrize("form", proof_but(FORMS, "nf4"))
def test_a_run_goes_on_and_what_it_stores_is_small(form: str, base: Path, tmp_path: Path) -> None:
    tree = {
        "model": {"hf": str(base), "base": form},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "train": {"steps": 2},
    }
    whole = trained(config_of(tmp_path / "whole", {**tree, "train": {"steps": 4}}))
    first = config_of(tmp_path / "run", tree)
    train(first)
    longer = first.model_copy(update={"train": first.train.model_copy(update={"steps": 4})})
    train(longer)
    assert losses(longer.run.dir) == losses(whole)
    assert_same_bits(weights(longer.run.dir), weights(whole))
    other = {**tree, "model": {"hf": str(base)}}
    with pytest.raises(ConfigError, match=rf"model\.base: {form} -> null"):
        train(config_of(tmp_path / "run", other))


@pytest.mark.proof
def test_bytes_that_a_step_reads(tmp_path: Path) -> None:
    """A quantized weight costs a byte and its scale, or half a byte and 1/16, a pass."""
    wide = {**UNTIED, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
    read = {}
    for form in (None, *FORMS):
        tree = {
            "model": {"hf": wide, "dtype": "bfloat16", "base": form},
            "data": {"python": "tests.support.datasets:text"},
            "lora": {"r": 2, "target_modules": ["q_proj"]},
            "memory": {"segment": "64KiB", "host": "64MiB"},
            "train": {"steps": 3, "recompute": True},
        }
        run_dir = trained(config_of(tmp_path / f"run-{form}", tree))
        static = run_dir / "static"
        size_bytes = sum(f.stat().st_size for f in static.rglob("*") if f.is_file())
        read[form] = size_bytes
        assert all(row["read_bytes"] <= 4 * size_bytes for row in rows(run_dir))
    assert read["int8"] < 0.65 * read[None]
    assert read["nf4"] < 0.45 * read[None]


def test_what_stays_as_it_is() -> None:
    """The head, tables, tied weights, vectors, short rows, and what has another order in memory."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)
            self.positions = nn.Parameter(torch.ones(1, 5, 8))
            self.first = nn.Linear(8, 8)
            self.mixed = nn.Conv1d(8, 8, 3)
            self.tied = nn.Linear(8, 8, bias=False)
            self.again = nn.Linear(8, 8, bias=False)
            self.again.weight = self.tied.weight
            self.turned = nn.Parameter(torch.ones(9, 8).T)
            self.stacked = nn.Parameter(torch.ones(2, 3, 8))
            self.head = nn.Linear(8, 8)

    odd = Net()
    odd.stacked = nn.Parameter(torch.ones(2, 9)[:, :8])
    assert quantizable(odd, form="int8") == {"first.weight"}
    assert quantizable(Net(), form="int8") == {"first.weight", "stacked"}
    assert quantizable(Net()) == {"first.weight", "stacked", "mixed.weight"}
    assert quantizable(Net(), ["first*"], form="int8") == {"stacked"}
    with pytest.raises(ConfigError, match=r"base_except: 'frist\*' matches no .* first"):
        quantizable(Net(), ["frist*"])


def test_inspect_and_plan_say_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {
        "model": {"hf": str(base), "base": "nf4"},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "train": {"steps": 1},
    }
    config = config_of(tmp_path / "run", tree)
    print_plan(config)
    assert "parameters as nf4: " in capsys.readouterr().out
    run_dir = trained(config)
    capsys.readouterr()
    inspect_run(run_dir)
    assert "frozen weights as nf4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"base": "nf4"}}, "no weight that it applies to is frozen"),
        (
            {"model": {"base": "nf4", "base_except": ["model.layer.*"]}, "lora": {"r": 2}},
            r"base_except: 'model.layer.\*' matches no parameter; the nearest are model",
        ),
        (
            {"model": {"base": "int8"}, "lora": {"r": 2, "use_dora": True}},
            "use_dora begins from the weights of the base",
        ),
    ],
)
def test_refusals(tree: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = {"hf": UNTIED, **tree["model"]}
    lora = tree.get("lora")
    whole: dict[str, Any] = {
        "model": model,
        "data": {"python": "tests.support.datasets:text"},
        **({"lora": {"target_modules": ["q_proj"], **lora}} if lora else {}),
    }
    config = config_of(tmp_path / "run", whole)
    for verb in (train, plan):
        with pytest.raises(ConfigError, match=message):
            verb(config)
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = float("inf")
    model.save_pretrained(tmp_path / "broken")
    tree = {
        "model": {"hf": str(tmp_path / "broken"), "base": "nf4"},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "train": {"check_capture": False},
    }
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj.* not finite"):
        train(config_of(tmp_path / "run", tree))
    kept = {**tree["model"], "base_except": ["model.layers.1.mlp.up_proj.weight"]}
    with pytest.raises(NotFiniteError):  # begun with it as it is, as the message says
        train(config_of(tmp_path / "run", {**tree, "model": kept}))
