"""`compare`: a job in plain PyTorch beside swaptrain, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, RunError
from swaptrain.reference import ReferenceResult
from swaptrain.verbs import compare
from swaptrain.verbs.comparison import need
from swaptrain.verbs.comparison.need import PlainNeed
from swaptrain.verbs.comparison.result import ComparedFigure
from tests.models.stored.test_pretrained import saved
from tests.support.models import gpt
from tests.support.runs import config_of
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "train": {"steps": 50},
    "memory": {"host": "64MiB", "segment": "16KiB"},
}


def file_of(run_dir: Path, **sections: Any) -> str:
    """Return the config file of a small job."""
    tree = dict(GPT)
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    config_of(run_dir, tree)
    return str(run_dir.with_suffix(".yaml"))


def test_equal_bits_are_said_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses, norms and held-out losses of each step; a run in run.dir stays as it is."""
    run_dir = tmp_path / "run"
    held_out = {"python": "tests.support.datasets:tokens", "every": 100, "batches": 2}
    file = file_of(run_dir, eval=held_out)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("an existing run\n")
    assert main(["compare", "--config", file, "--steps", "3"]) == 0
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines() if line[:1].isdigit()]
    assert [row[:2] for row in rows] == [
        *([str(step), name] for step in (1, 2) for name in ("loss", "grad_norm")),
        *(["3", name] for name in ("loss", "grad_norm", "eval_loss")),
    ]
    assert all(row[2] == row[3] and row[4] == "equal" for row in rows)
    assert "equal bit for bit: 3 steps" in printed.out
    assert "plain PyTorch: 3 steps" in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.yaml"]
    assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]


def test_a_difference_names_the_first_tensor_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch whose last weight is another than it should be."""
    plain_run: Callable[..., ReferenceResult] = compare.plain_run

    def other(config: Config, *args: Any, **options: Any) -> ReferenceResult:
        found = plain_run(config, *args, **options)
        found.losses[1] += 1
        found.parameters["scale"][3] += 0.5
        return found

    monkeypatch.setattr(compare, "plain_run", other)
    assert main(["compare", "--config", file_of(tmp_path / "run")]) == 1
    printed = capsys.readouterr()
    assert "the loss of step 2" in printed.err
    assert "first in the model's order scale (1 of 32 elements, 0.5 at most)" in printed.err
    assert "equal bit for bit" not in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("error", [RunError("the disk has gone"), KeyboardInterrupt()])
def test_nothing_is_left_after_a_failure(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Config, **_: Any) -> None:
        (config.run.dir / "store").mkdir(parents=True)
        raise error

    monkeypatch.setattr(compare, "train", train)
    code = 1 if isinstance(error, RunError) else 130
    assert main(["compare", "--config", file_of(tmp_path / "run")]) == code
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"kwargs": {"dropout": 0.1}}}, "draws random numbers in its forward"),
        ({"train": {"skip_ignored": True}}, "train.skip_ignored leaves rows out"),
        ({"memory": {"tokens": 8}}, "memory.tokens sums the gradients"),
    ],
)
def test_what_differs_by_design_is_refused(
    sections: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--config", file_of(tmp_path / "run", **sections)]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_gpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    file = file_of(tmp_path / "run")
    assert main(["compare", "--config", file, "device=auto"]) == 2
    assert "device is auto, which is a GPU here" in capsys.readouterr().err
    assert main(["compare", "--config", file, "--steps", "0"]) == 2
    assert "--steps is 0: give 1 or more" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_with_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(need, "available_bytes", lambda: 2**20)
    assert main(["compare", "--config", file_of(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "plain PyTorch would take" in said and "1.0 MiB of RAM are free" in said
    assert "of weights" in said and "of activations" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(("dtype", "narrow"), [("float32", 0), ("bfloat16", 2)])
def test_the_need_is_that_of_the_loop(
    dtype: str, narrow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 bytes a weight and a gradient (in 16 bits 2 more), 8 of Adam's moments."""
    found: list[PlainNeed] = []

    def refuse(need: PlainNeed) -> None:
        found.append(need)
        raise ConfigError("enough was seen")

    monkeypatch.setattr(compare, "check_room", refuse)
    file = file_of(tmp_path / "run", model={"dtype": dtype}, optimizer={"state": "8bit"})
    assert main(["compare", "--config", file]) == 2
    count = sum(p.numel() for p in gpt(layers=1).parameters())
    assert found[0].weights == found[0].gradients == (4 + narrow) * count
    assert found[0].state == 8 * count and found[0].activations > 0


def test_a_checkpoint_is_compared_from_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a directory of transformers holds is where both begin; in bfloat16 norms may differ."""
    directory = saved({**LLAMA, "tie_word_embeddings": False}, tmp_path / "checkpoint")
    tree = {
        "model": {"hf": str(directory), "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:text"},
        "memory": {"host": "64MiB"},
    }
    config_of(tmp_path / "run", tree)
    assert main(["compare", "--config", str(tmp_path / "run.yaml")]) == 0
    assert "equal bit for bit: 2 steps" in capsys.readouterr().out


@pytest.mark.proof
@pytest.mark.parametrize("base", [None, "nf4"])
def test_adapters_on_a_checkpoint_are_compared(
    base: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = saved({**LLAMA, "tie_word_embeddings": False}, tmp_path / "checkpoint")
    tree = {
        "model": {"hf": str(directory), "base": base},
        "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "data": {"python": "tests.support.datasets:text"},
        "memory": {"host": "64MiB"},
    }
    config_of(tmp_path / "run", tree)
    assert main(["compare", "--config", str(tmp_path / "run.yaml")]) == 0
    assert "equal bit for bit: 2 steps" in capsys.readouterr().out


def test_norms_of_blocks_may_differ_in_their_last_digits_alone() -> None:
    near, far = 1 + 1e-7, 1 + 1e-3
    assert ComparedFigure(1, "grad_norm", 1.0, near, exact=False).agrees
    assert not ComparedFigure(1, "grad_norm", 1.0, far, exact=False).agrees
    assert not ComparedFigure(1, "grad_norm", 1.0, near).agrees
    assert ComparedFigure(1, "grad_norm", None, None).agrees
    assert not ComparedFigure(1, "loss", 1.0, None, exact=False).agrees
