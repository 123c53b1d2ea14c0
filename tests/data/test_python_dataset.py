"""Datasets by Python path, and held-out data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swaptrain.config.data import DataConfig, EvalConfig
from swaptrain.data import open_data, open_eval, open_example
from swaptrain.errors import ConfigError

Config = Callable[..., DataConfig]

MODULE = """
import torch

class Squares(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index)), "y": index * index}

def squares(count=4):
    return Squares(count)

def fails():
    raise OSError("no pictures here")

def number():
    return 3

number_itself = 3

def generator():
    yield {}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module into the current directory; give its name."""
    name = f"pictures_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/usr/lib"])
    return name


def test_a_dataset_of_the_current_directory(
    module: str, data_config: Config, tmp_path: Path
) -> None:
    """The function gets its kwargs; items are stacked and counted instead of tokens."""
    config = data_config(python=f"{module}:squares", kwargs={"count": 5}, micro_batch=2)
    batches = open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)
    assert len(batches) == 5
    assert batches.tokens_per_micro_batch == 2
    assert batches.batch(2, 0)["x"].tolist() == [[2.0, 2.0], [3.0, 3.0]]
    assert batches.batch(2, 0)["y"].tolist() == [4, 9]
    example = open_example(config, model_vocabulary=None)
    assert torch.equal(example["x"], batches.example()["x"])


def test_a_dataset_of_another_length_is_refused_on_resume(
    module: str, data_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order depends on the length, so it is part of what the run began with."""
    config = data_config(python=f"{module}:squares", kwargs={"count": 5})
    open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)
    (tmp_path / f"{module}.py").write_text(MODULE.replace("return self.count", "return 3"))
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ConfigError, match="the dataset's length"):
        open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)


def test_what_is_no_dataset_is_refused(module: str, data_config: Config, tmp_path: Path) -> None:
    """Each way in which the path can be wrong has its message."""
    for target, message in {
        f"{module}_missing:squares": "does not import",
        f"{module}_broken:squares": "nothing_of_this_name",
        f"{module}:triangles": "has no triangles",
        f"{module}:number_itself": "is not a function but int",
        f"{module}:fails": "OSError: no pictures here",
        f"{module}:number": "has no __len__ and no __getitem__",
        f"{module}:generator": "returned generator",
    }.items():
        config = data_config(python=target)
        with pytest.raises(ConfigError, match=message):
            open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)
    config = data_config(python=f"{module}:squares", kwargs={"size": 3})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)
    assert not (tmp_path / "run").exists()


def test_held_out_text_comes_in_order(
    corpus: Callable[..., Path], data_config: Config, tmp_path: Path
) -> None:
    """batch(1, i) of the held-out data is its i-th micro-batch; a new corpus is simply taken."""
    directory = corpus(train="training text " * 9, held="0123456789abcdefghijklmnopqrstuvwxyz")
    data = data_config(text=[f"{directory}/train.txt"], shuffle=True, micro_batch=2)
    config = EvalConfig(text=(f"{directory}/held.txt",), every=1, batches=2)
    batches = open_data(data, seed=0, run_dir=tmp_path / "run", model_vocabulary=257)
    held = open_eval(config, data, run_dir=tmp_path / "run", model_vocabulary=257, like=batches)
    shown = [bytes(held.batch(1, i)["input_ids"].flatten().tolist()) for i in range(2)]
    assert shown == [b"0123456789abcdef", b"ghijklmnopqrstuv"]
    corpus(held="another text, also of some length")
    held = open_eval(config, data, run_dir=tmp_path / "run", model_vocabulary=257, like=batches)
    assert bytes(held.example()["input_ids"][0].tolist()) == b"another "


def test_held_out_data_of_another_kind_is_refused(
    module: str, corpus: Callable[..., Path], data_config: Config, tmp_path: Path
) -> None:
    """The captured model takes one kind of batch."""
    directory = corpus(train="training text " * 9)
    data = data_config(text=[f"{directory}/train.txt"])
    config = EvalConfig(python=f"{module}:squares", every=1)
    batches = open_data(data, seed=0, run_dir=tmp_path / "run", model_vocabulary=257)
    with pytest.raises(ConfigError, match="the model takes one kind"):
        open_eval(config, data, run_dir=tmp_path / "run", model_vocabulary=None, like=batches)


class Uneven:
    """A dataset of which one item in the middle is shorter."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(3 if index == 101 else 4)}


def uneven() -> Uneven:
    return Uneven()


def test_an_item_of_another_shape_is_found_at_the_start(data_config: Config) -> None:
    """Not when the run comes to it."""
    config = data_config(python=f"{__name__}:uneven")
    with pytest.raises(ConfigError, match=r"item 101 of data\.python .* has x float32\[3\]"):
        open_example(config, model_vocabulary=None)
