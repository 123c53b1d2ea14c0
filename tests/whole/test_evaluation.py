"""Held-out losses over the command: those of `model.eval()`, with every item counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swaptrain.config.data import DataConfig, EvalConfig
from swaptrain.config.schema import Config
from swaptrain.data import look_at_held_out, open_eval
from swaptrain.errors import BudgetError, CaptureError, ConfigError
from swaptrain.planning.prepare import Prepared
from tests.capture.test_evaluation import Base
from tests.support.matrix import proof_but
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    reference,
    rows,
    trained,
    weights,
)

pytestmark = pytest.mark.trains

HERE = "tests.whole.test_evaluation"
MODELS = "tests.capture.test_evaluation"


class Items:
    """Item i is a function of i: [T, D] and a class."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(self.first + index)
        return {"x": torch.randn(6, 16, generator=g), "y": torch.randint(0, 4, (), generator=g)}


def items(length: int, first: int = 0) -> Items:
    return Items(length, first)


def job(run_dir: Path, kind: str, **sections: Any) -> Config:
    """Train a member of `tests/capture/test_evaluation.py`, with ten held-out items by fours."""
    held_out = {"python": f"{HERE}:items", "kwargs": {"length": 10, "first": 100}, "every": 2}
    tree: dict[str, Any] = {
        "model": {"python": f"{MODELS}:{kind}"},
        "data": {
            "python": f"{HERE}:items", "kwargs": {"length": 40},
            "micro_batch": 4, "micro_batches": 2,
        },
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 4},
        "eval": {**held_out, "batches": "all"},
    }  # fmt: skip
    for section, fields in sections.items():
        tree[section] = fields if fields is None else {**tree.get(section, {}), **fields}
    return config_of(run_dir, tree)


def held_out_losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in rows(run_dir) if "eval_loss" in row}


SMALL = {"memory": {"segment": "4KiB"}}
CLIPPED = {"optimizer": {"clip_norm": 0.5}, **SMALL}
TREES = {"store": {"commit": {"every": 2}}, **SMALL}


@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        pytest.param("Norms", SMALL, id="norms"),
        pytest.param("StillEncoder", SMALL, id="encoder"),
        pytest.param("EvaluationBranch", SMALL, id="other order", marks=pytest.mark.proof),
        pytest.param("Average", CLIPPED, id="average, clipped", marks=pytest.mark.proof),
        pytest.param("Spectral", TREES, id="spectral norm, trees"),
        pytest.param(
            "FrozenNorm", {"eval": {"batches": 2}}, id="whole batches only", marks=pytest.mark.proof
        ),
        pytest.param(
            "Mutual",
            {"eval": {"kwargs": {"length": 3}}},
            id="less than a batch",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "Norms", {"model": {"dtype": "bfloat16"}}, id="norms, bfloat16", marks=pytest.mark.proof
        ),
    ],
)
def test_a_run_gives_the_held_out_losses_of_plain_pytorch(
    kind: str, sections: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit, and the steps between them are what they are without held-out data."""
    config = job(tmp_path / "run", kind, **sections)
    run_dir = trained(config)
    plain = reference(config)
    assert set(plain.eval_losses) == {2, 4}
    assert held_out_losses(run_dir) == plain.eval_losses
    assert losses(run_dir) == plain.losses


def test_every_held_out_item_counts_once(tmp_path: Path) -> None:
    """Ten items by fours: the mean over ten items, not over the twelve of a second round."""
    config = job(tmp_path / "run", "Base", train={"steps": 2})
    found = held_out_losses(trained(config))[2]
    torch.manual_seed(config.train.seed)
    model = reference_model(config)
    whole = torch.stack([Items(10, 100)[i]["x"] for i in range(10)])
    labels = torch.stack([Items(10, 100)[i]["y"] for i in range(10)])
    with torch.no_grad():
        expected = float(model(whole, labels))
        round_about = [i % 10 for i in range(12)]
        wrong = float(model(whole[round_about], labels[round_about]))
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(found - wrong) > 1e-4


def reference_model(config: Config) -> torch.nn.Module:
    """Return the model with the weights of the run, in evaluation mode."""
    model = Base().eval()
    model.load_state_dict(weights(config.run.dir))
    return model


@pytest.mark.parametrize("batches", proof_but([1, 3, 100, "all"], 3, "all"))
def test_as_many_batches_are_taken_as_there_are(batches: int | str, tmp_path: Path) -> None:
    """Of seven sequences of text by threes; before it is tokenised into the run, and afterwards."""
    text = tmp_path / "held-out.txt"
    text.write_text("".join(chr(97 + i * 7 % 26) for i in range(16 * 7 + 5)))
    data = DataConfig(text=(str(text),), sequence_length=16, micro_batch=3)
    held_out = EvalConfig(text=(str(text),), every=1, batches=batches)
    taken = {1: 3, 3: 7, 100: 7, "all": 7}[batches]
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "model_vocabulary": 257}
    for _ in range(2):
        assert look_at_held_out(held_out, data, **settings).items == taken
        opened = open_eval(held_out, data, **settings)
        sizes = [len(opened.batch(1, m)["labels"]) for m in range(opened.micro_batches)]
        assert sizes == [3, 3, 1][: len(sizes)] and sum(sizes) == taken


def test_held_out_text_has_the_losses_of_plain_pytorch(tmp_path: Path) -> None:
    """Three batches of a Llama, of which the last has one sequence."""
    text = tmp_path / "held-out.txt"
    text.write_text("".join(chr(97 + i * 7 % 26) for i in range(16 * 7 + 5)))
    tree = {
        "model": {"hf": {
            "model_type": "llama", "vocab_size": 260, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2,
        }},
        "data": {"text": [str(text)], "sequence_length": 16, "micro_batch": 3, "micro_batches": 1},
        "train": {"steps": 1},
        "eval": {"text": [str(text)], "every": 1, "batches": "all"},
    }  # fmt: skip
    config = config_of(tmp_path / "run", tree)
    assert held_out_losses(trained(config)) == reference(config).eval_losses


@pytest.mark.proof
def test_held_out_data_that_comes_later_changes_no_step(tmp_path: Path) -> None:
    """Begun without, gone on with, and the figures are those of a run that always had it."""
    whole = trained(job(tmp_path / "whole", "Norms", **SMALL))
    first = {**SMALL, "eval": None, "train": {"steps": 2}}
    trained(job(tmp_path / "run", "Norms", **first))
    run_dir = trained(job(tmp_path / "run", "Norms", **SMALL))
    assert held_out_losses(run_dir)[4] == held_out_losses(whole)[4]
    assert losses(run_dir) == losses(whole)
    assert_same_bits(weights(run_dir), weights(whole))


class Drawn(Base):
    """Reads a tensor in evaluation mode that its constructor draws behind a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(16, 512)
        self.codes = torch.randn(16)

    def mid(self, h: Tensor) -> Tensor:
        return h if self.training else h * self.codes


@pytest.mark.proof
def test_a_drawn_constant_is_the_same_after_a_resume(tmp_path: Path) -> None:
    """It is no buffer, so no store has it: the constructor draws it again."""
    model = {"model": {"python": f"{HERE}:Drawn"}}
    trained(job(tmp_path / "run", "", **model, train={"steps": 2}))
    config = job(tmp_path / "run", "", **model)
    assert held_out_losses(trained(config)) == reference(config).eval_losses


@pytest.mark.parametrize("kind", proof_but(["Structure", "ReadsValues", "Chained"], "ReadsValues"))
def test_a_refused_evaluation_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """Before a byte is written; without `eval` the same model trains."""
    config = job(tmp_path / "run", kind)
    with pytest.raises(CaptureError, match="evaluation mode"):
        trained(config)
    assert not config.run.dir.exists()
    trained(job(tmp_path / "run", kind, eval=None, train={"steps": 1}))


@pytest.mark.proof
def test_the_least_budget_holds_in_an_evaluation(tmp_path: Path) -> None:
    """A refusal names a budget, in which the run evaluates with the same figures."""
    config = job(tmp_path / "run", "Encoder", **SMALL)
    expected = held_out_losses(trained(config))
    tight = job(tmp_path / "tight", "Encoder", memory={"segment": "4KiB", "host": "1MiB"})
    with pytest.raises(BudgetError, match=r"memory\.host") as refusal:
        trained(tight)
    size = str(refusal.value).partition("set memory.host to ")[2].partition(",")[0]
    fitting = job(tmp_path / "tight", "Encoder", memory={"segment": "4KiB", "host": size})
    assert held_out_losses(trained(fitting)) == expected


def test_an_evaluation_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    """Its program has an instruction for each batch and slice."""
    long = {"kwargs": {"length": 10**9}}
    with pytest.raises(ConfigError, match=r"eval\.batches is 250,000,000: that makes"):
        Prepared(job(tmp_path / "run", "Base", eval=long), None, lambda _: None, draw=False)


def test_data_that_shrinks_while_a_start_looks_at_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are made for as many batches as there were."""
    looked = Prepared.__init__

    def shrinks(*args: Any, **options: Any) -> None:
        looked(*args, **options)
        monkeypatch.setattr(Items, "__len__", lambda self: 2 if self.first else 40)

    monkeypatch.setattr(Prepared, "__init__", shrinks)
    with pytest.raises(ConfigError, match="has 1 batch now"):
        trained(job(tmp_path / "run", "Base"))
