"""Micro-batches that processes make ahead, and those that a function collates."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from swaptrain.config.data import DataConfig
from swaptrain.data import Batches, open_data, open_example
from swaptrain.errors import ConfigError, RunError

Config = Callable[..., DataConfig]


class Drawn:
    """Items of several dtypes, with noise of the global generators, of uneven length."""

    def __init__(self, short: int = -1) -> None:
        self.short = short

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "noise": torch.randn(3) + np.random.rand(),
            "half": torch.full((2, 2), index, dtype=torch.bfloat16),
            "label": index,
        }


def drawn(short: int = -1) -> Drawn:
    return Drawn(short)


class Texts:
    """Items that are no tensors: texts of several lengths."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> str:
        return "x" * (index % self.longest + 1)


def texts(longest: int = 5) -> Texts:
    return Texts(longest)


def padded(items: list[str]) -> dict[str, torch.Tensor]:
    """Return ids of one length, however long the texts are."""
    rows = [list(text.encode()) + [0] * (8 - len(text)) for text in items]
    return {"ids": torch.tensor(rows) + torch.randint(0, 100, ())}


def as_long_as_the_longest(items: list[str]) -> dict[str, torch.Tensor]:
    longest = max(map(len, items))
    return {"ids": torch.tensor([list(text.encode().ljust(longest)) for text in items])}


def one_row(items: list[str]) -> dict[str, torch.Tensor]:
    return {"ids": torch.zeros(1)}


def opened(config: DataConfig, run_dir: Path) -> Batches:
    return open_data(config, seed=7, run_dir=run_dir, model_vocabulary=None)


def config(**fields: Any) -> DataConfig:
    """Return the config of three micro-batches of four items."""
    return DataConfig(
        **{"python": f"{__name__}:drawn", "micro_batch": 4, "micro_batches": 3, **fields}
    )


@pytest.mark.trains
@pytest.mark.parametrize("workers", [1, 3])
def test_the_bits_do_not_depend_on_who_makes_them(workers: int, tmp_path: Path) -> None:
    """In any order, over epochs' ends, and asked for twice."""
    alone = opened(config(), tmp_path / "alone")
    ahead = opened(config(workers=workers), tmp_path / "ahead")
    places = [(s, m) for s in (1, 2, 5, 3) for m in (0, 1, 2)] + [(3, 2), (3, 0)]
    try:
        for place in places:
            expected, found = alone.batch(*place), ahead.batch(*place)
            assert expected.keys() == found.keys()
            for key, tensor in expected.items():
                assert tensor.dtype == found[key].dtype
                assert torch.equal(tensor, found[key])
    finally:
        ahead.close()


@pytest.mark.trains
def test_a_process_that_dies_is_an_error(tmp_path: Path) -> None:
    """The run can be resumed; nothing waits for ever."""
    batches = opened(config(workers=1), tmp_path)
    batches.batch(1, 0)
    pool = batches._ahead._pool  # type: ignore[union-attr]  # its processes have no other name
    for number in list(pool._processes):
        os.kill(number, signal.SIGKILL)
    with pytest.raises(RunError, match=r"has died: .* Lower data\.workers"):
        for step in range(2, 6):
            batches.batch(step, 0)


@pytest.mark.trains
def test_a_dataset_that_fails_in_another_process_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says itself, not that a process has died."""
    (tmp_path / "only_once.py").write_text(
        "import os\nfrom tests.data.test_read_ahead import Drawn\n"
        "def items():\n"
        f"    if os.getpid() != {os.getpid()}: raise OSError('no second connection')\n"
        "    return Drawn()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    batches = opened(config(python="only_once:items", workers=1), tmp_path / "run")
    try:
        with pytest.raises(RunError, match=r"cannot begin: .*no second connection"):
            batches.batch(1, 0)
    finally:
        batches.close()


def test_a_function_collates(tmp_path: Path) -> None:
    """Items may be anything; its draws are the same at each reading."""
    settings = config(python=f"{__name__}:texts", collate=f"{__name__}:padded")
    batches = opened(settings, tmp_path)
    batch = batches.batch(2, 1)
    assert batch["ids"].shape == (4, 8)
    assert torch.equal(batch["ids"], batches.batch(2, 1)["ids"])
    assert not torch.equal(batch["ids"] - batch["ids"].min(), batches.batch(1, 0)["ids"])
    assert open_example(settings, model_vocabulary=None)["ids"].shape == (4, 8)


def test_shapes_that_differ_are_found_at_the_start() -> None:
    """The captured model takes one shape."""
    settings = config(python=f"{__name__}:texts", collate=f"{__name__}:as_long_as_the_longest")
    with pytest.raises(ConfigError, match=r"data\.collate gives ids int64\[1, 2\] for the items"):
        open_example(settings, model_vocabulary=None)
    settings = config(python=f"{__name__}:texts", collate=f"{__name__}:one_row")
    with pytest.raises(ConfigError, match="the first dimension is that of the 4 items"):
        opened(settings, Path("unused"))


@pytest.mark.parametrize("name", ["collate", "workers"])
def test_keys_of_a_python_dataset(name: str) -> None:
    """Text and tokens need neither."""
    value: Any = 2 if name == "workers" else "a:b"
    with pytest.raises(ValidationError, match=f"{name} belongs to python, which is not set"):
        DataConfig(text=("a",), **{name: value})
