"""`plan --json`, `--suggest`, `--what-if`, `--layers`: other choices and other machines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.machine.speeds import Machine
from swaptrain.program.cost import Disk, IOWork
from swaptrain.store.format.root import RootRecord
from swaptrain.units import GIB
from swaptrain.verbs.plans import planned as planned_module
from swaptrain.verbs.plans.bound import bound, bounding
from swaptrain.verbs.plans.layers_table import hints_of, layers_of
from swaptrain.verbs.plans.planned import Planned, planned
from swaptrain.verbs.plans.suggest import suggest
from swaptrain.verbs.plans.what_if import parse_machine, seconds_on, what_if
from tests.support.runs import config_of
from tests.verbs.test_plan import LLAMA, TEXT

pytestmark = pytest.mark.trains

SLOW = Machine(Disk(2e7, 2e7, 2e7), 0.1, IOWork(), {"float32": 1e11, "bfloat16": 1e11})
"""A disk that bounds every step of a small model."""
FAST = Machine(Disk(1e13, 1e13, 1e13), 0.0, IOWork(), {"float32": 1e11, "bfloat16": 1e11})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_module, "known_machine", lambda path, device: SLOW)


def job(tmp_path: Path, **sections: Any) -> Config:
    memory = {"host": "64MiB", "segment": "4MiB"}
    train = {"recompute": None, **sections.pop("train", {})}
    tree = {"model": {"hf": LLAMA}, "data": TEXT, "memory": memory, "train": train, **sections}
    return config_of(tmp_path / "run", tree)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_module, "known_machine", lambda path, device: SLOW)
        return planned(job(tmp_path_factory.mktemp("found")))


def test_json_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the standard output, which has nothing else."""
    job(tmp_path)
    command = ["plan", "--config", str(tmp_path / "run.yaml"), "--json", "--layers"]
    assert main([*command, "--what-if", "disk 10GB/s"]) == 0
    printed = capsys.readouterr()
    tree = json.loads(printed.out)
    assert "capturing" in printed.err
    plan, (other,) = tree["plan"], tree["what_if"]
    assert plan["parameters"] == plan["trained_parameters"] > 2e6
    assert plan["steps_left"] == 5
    assert other["io_s"] == pytest.approx(plan["io_s"] / 500, rel=0.3)
    assert sum(layer["parameters"] for layer in tree["layers"]) == plan["parameters"]


def test_layers_add_up(found: Planned) -> None:
    """To the model's parameters, and to the flops of its segments; the largest comes first."""
    rows = layers_of(found)
    model = found.made.captured.model
    assert sum(row.parameters for row in rows) == model.parameter_count
    assert sum(row.flops for row in rows) == sum(s.flops for s in model.segments)
    sizes = [row.total_bytes for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    named = {row.name: row for row in rows}
    gate = named["model.layers.0.mlp.gate_proj"]
    assert gate.parameters == 256 * 512
    assert gate.weight_bytes == gate.gradient_bytes == 4 * gate.parameters
    assert gate.state_bytes >= 8 * gate.parameters
    assert gate.flops % (2 * gate.parameters) == 0 and gate.flops > 0


class Images(torch.nn.Module):
    """A convolution whose bias a batch norm cancels, and a wide classifier of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Conv2d(3, 64, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(64)
        self.head = torch.nn.Linear(64, 1003)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.features(pixels)))
        return torch.nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Pictures(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Noise."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randn(3, 64, 64, generator=generator)
        return {"pixels": pixels, "labels": torch.tensor(index)}


def test_hints_name_the_module(tmp_path: Path) -> None:
    here = __name__
    tree = {"model": {"python": f"{here}:Images"}, "data": {"python": f"{here}:Pictures"}}
    made = planned(job(tmp_path, **tree))
    hints = hints_of(made, layers_of(made))
    assert any(name == "features" and "bias=False" in text for name, text in hints)
    assert any(name == "head" and "1,003 outputs: 1,008" in text for name, text in hints)
    assert any("could be in place" in text for _, text in hints)
    assert any("train.channels_last" in text for _, text in hints)
    tree["train"] = {"channels_last": True}  # type: ignore[dict-item]
    laid_out = planned(job(tmp_path, **tree))
    assert not any("channels_last" in text for _, text in hints_of(laid_out, layers_of(laid_out)))


@pytest.mark.parametrize(
    ("seconds", "what"),
    [((10, 2, 10.5), "disk"), ((2, 10, 10.5), "processor"), ((8, 8, 15), "memory")],
)
def test_what_bounds_a_step(seconds: tuple[float, float, float], what: str) -> None:
    assert bounding(*seconds) == what


def test_a_slow_disk_asks_for_a_larger_batch(
    found: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or for more memory, whichever makes a token cheaper; a fast one for neither."""
    said = bound(found)
    assert said is not None and said.startswith("the disk, which works for ")
    assert "of the time per token" in said
    monkeypatch.setattr(planned_module, "known_machine", lambda path, device: FAST)
    fast = bound(planned(found.config))
    assert fast is not None and fast.startswith("computing, ")
    assert "only a faster processor" in fast or "of the time per token" in fast


@pytest.mark.proof
def test_suggestions_are_plans(found: Planned) -> None:
    """Each is what `plan` says of that config, and the best comes first."""
    noted: list[str] = []
    choices, refused = suggest(found, noted.append)
    assert not [one for one in refused if "micro_batches" in one.changes]
    times = [choice.token_s for choice in choices if choice.token_s is not None]
    assert times == sorted(times) and len(times) == len(choices) > 5
    by_words = {choice.words: choice for choice in choices}
    assert by_words["as it is"].token_s == pytest.approx(found.token_s, rel=0.5)
    coded, whole = by_words["optimizer.state=8bit"], by_words["as it is"]
    assert coded.write_bytes < 0.75 * whole.write_bytes
    assert coded.disk_bytes < 0.75 * whole.disk_bytes
    four = by_words["data.micro_batches=12"]
    assert four.tokens == 4 * whole.tokens and four.written_a_token < whole.written_a_token
    assert any(len(choice.changes) > 2 for choice in choices), "what is best together"
    assert all(f"trying {words}" in noted for words in by_words if words != "as it is")


def test_suggestions_are_for_runs_that_begin(found: Planned) -> None:
    going_on = dataclasses.replace(found, root=Mock(spec=RootRecord))
    with pytest.raises(ConfigError, match=r"--suggest: .* holds a run"):
        suggest(going_on, print)


def test_a_machine_is_read() -> None:
    text = "disk 7GB/s read, 5GB/s write; 100 TFLOPS; pcie 25GB/s; ram 64GiB"
    found = parse_machine(text)
    assert found.disk == Disk(7e9, 5e9, pytest.approx(2 / (1 / 7e9 + 1 / 5e9)))
    assert found.flops_per_s == 1e14
    assert found.link_bytes_per_s == 25e9
    assert found.ram_bytes == 64 * GIB
    assert parse_machine("disk 3GB/s").disk == Disk(3e9, 3e9, 3e9)
    assert parse_machine("disk 7GB/s read, 5GB/s write, 6GB/s both").disk == Disk(7e9, 5e9, 6e9)


@pytest.mark.parametrize(
    "text",
    [
        "a fast one",
        "disk 7GB",
        "disk fast",
        "100 FLOPS",
        "0 TFLOPS",
        "ram",
        "pcie 3GB/s",
        "disk 0GB/s",
    ],
)
def test_a_machine_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_machine(text)


def test_another_machine_is_rehearsed(found: Planned, tmp_path: Path) -> None:
    """Twice the disk, half of its seconds; a processor without end leaves the disk alone."""
    twice = what_if(found, parse_machine("disk 40MB/s"))
    assert found.io_s is not None and found.price.step_s is not None
    assert twice.io_s == pytest.approx(found.io_s / 2, rel=0.02)
    assert twice.step_s < found.price.step_s
    device = what_if(found, parse_machine("100 PFLOPS; pcie 100GB/s"))
    assert device.compute_s < found.price.compute_s
    assert device.bound == "disk"
    small = planned(job(tmp_path, memory={"host": "40MiB", "segment": "4MiB"}))
    large = what_if(small, parse_machine("ram 64GiB"))
    assert small.io_s is not None and large.io_s < small.io_s
    with pytest.raises(BudgetError, match="this cut needs"):
        what_if(found, parse_machine("ram 1GiB"))


def test_another_machine_chooses_which_segments_save(found: Planned) -> None:
    """A slow processor with a fast disk reads what this one computes again."""
    here = dataclasses.replace(found, made=found.unchosen)
    slow = parse_machine("disk 10000GB/s; 1 GFLOPS")
    seconds = seconds_on(here, slow)(here.made)
    again_s = sum(seconds(instruction) for instruction in here.made.step)
    other = what_if(here, slow)
    assert other.compute_s < 0.9 * again_s
    assert other.disk_bytes > here.disk_bytes_of(here.made, here.config)  # for what they save
