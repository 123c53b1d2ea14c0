"""Random items of a Python dataset: seeded by seed, epoch and item, or refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swaptrain.config.data import DataConfig, EvalConfig
from swaptrain.data import open_data, open_eval, open_example
from swaptrain.data.batches import Batches
from swaptrain.data.seeded import check_repeatable, item_seed
from swaptrain.errors import ConfigError

Item = Mapping[str, Any]


class Items:
    """A dataset of eight items that a function makes."""

    def __init__(self, make: Callable[[int], Item]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Item:
        return self.make(index)


def draw(index: int) -> Item:
    """Draw from the three global generators, as augmentations do."""
    return {
        "torch": torch.randn(2) + index,
        "numpy": np.random.randn(),
        "python": random.random(),
        "permuted": torch.randperm(4),
    }


def batches(dataset: Items, **fields: Any) -> Batches:
    settings = {"seed": 3, "shuffle": True, "micro_batch": 2, "micro_batches": 2, **fields}
    return Batches(dataset, name="data", digest="", draws=True, **settings)


def same(left: Item, right: Item) -> bool:
    return all(torch.equal(left[key], right[key]) for key in left)


def test_an_item_is_what_plain_python_draws_under_its_seed() -> None:
    """Seed the three generators by item_seed(seed, epoch, item), and call the dataset."""
    data = batches(Items(draw))
    for step, epoch in ((1, 0), (3, 1), (5, 2)):
        found = data.batch(step, 0)
        for row, index in enumerate(data.items(step, 0)):
            seed = item_seed(3, epoch, index)
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            for key, value in draw(index).items():
                assert torch.equal(found[key][row], torch.as_tensor(value)), (step, key)


def test_order_and_threads_change_no_item() -> None:
    """Read backwards, again, and from four threads at once: the same; each epoch another draw."""

    def slow(index: int) -> Item:
        item = draw(index)
        time.sleep(0.001)  # another thread would draw between these
        return {**item, "late": torch.randn(1)}

    data = batches(Items(slow), shuffle=False)
    places = [(step, m) for step in (1, 2, 3, 4) for m in (0, 1)]
    forwards = [data.batch(*place) for place in places]
    assert all(same(data.batch(*p), f) for p, f in zip(places[::-1], forwards[::-1], strict=True))
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(lambda place: data.batch(*place), places))
    assert all(map(same, threaded, forwards))
    assert data.items(1, 0) == data.items(3, 0)
    assert not torch.equal(forwards[0]["torch"], forwards[4]["torch"])
    assert not torch.equal(
        forwards[0]["torch"][0], batches(Items(slow), seed=4).batch(1, 0)["torch"][0]
    )


def test_the_generators_are_put_back_also_after_an_error() -> None:
    """A read moves none of the caller's generators, and neither does one that fails."""

    def fails(index: int) -> Item:
        if index:
            raise OSError(str(torch.rand(1)))
        return draw(index)

    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    data = batches(Items(fails), shuffle=False)
    with pytest.raises(Exception, match="item 1 of data"):
        data.batch(1, 0)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])


def counting() -> Items:
    counter = iter(range(10**6))
    return Items(lambda index: {"x": index + next(counter)})


def cached_iterator() -> Items:
    numbers = iter(np.random.default_rng(0).normal(size=1000))
    return Items(lambda index: {"x": float(next(numbers))})


class Owning(Items):
    """Holds a generator of its own, in a list of transforms, that is used now and then."""

    def __init__(self, generator: Any, use: Callable[[Any], object]) -> None:
        super().__init__(lambda index: {"x": float(index)})
        self.transforms = [{"rng": generator}]
        self.use = use

    def __getitem__(self, index: int) -> Item:
        self.use(self.transforms[0]["rng"])
        return super().__getitem__(index)


STATEFUL: dict[str, tuple[Items, str]] = {
    "counter": (counting(), "'x' differs when the item is read twice"),
    "iterator": (cached_iterator(), "'x' differs"),
    "time": (Items(lambda index: {"t": float(time.perf_counter_ns() % 10**6)}), "'t' differs"),
    "numpy": (Owning(np.random.default_rng(0), lambda g: g.normal()), r"transforms\.0\.rng"),
    "state": (Owning(np.random.RandomState(0), lambda g: g.rand()), r"transforms\.0\.rng"),
    "torch": (Owning(torch.Generator(), lambda g: torch.rand(1, generator=g)), r"0\.rng"),
    "python": (Owning(random.Random(0), lambda g: g.random()), r"transforms\.0\.rng"),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_what_seeding_does_not_reach_is_refused(name: str) -> None:
    """Counters, iterators, clocks and own generators are named, with what to do."""
    dataset, message = STATEFUL[name]
    with pytest.raises(ConfigError, match=f"no function of its index: .*{message}"):
        check_repeatable(dataset, batches(dataset).item, 8, "data.python (m:f)")


def test_what_is_a_function_of_its_index_passes() -> None:
    """Global draws, NaN, a generator made of the index, one that is held and not used."""
    for dataset in (
        Items(draw),
        Items(lambda index: {"x": float("nan")}),
        Items(lambda index: {"x": np.random.default_rng(index).normal()}),
        Owning(np.random.default_rng(0), lambda g: None),
    ):
        check_repeatable(dataset, batches(dataset).item, 8, "data")


def test_few_items_are_read_and_one_item_is_enough() -> None:
    """The check reads at most eight items twice, and works on a dataset of one item."""
    read: list[int] = []

    def item(index: int) -> dict[str, torch.Tensor]:
        read.append(index)
        return {"x": torch.tensor(index)}

    check_repeatable(object(), item, 10**6, "data")
    assert len(read) == 16
    assert {0, 10**6 - 1} <= set(read)
    check_repeatable(object(), item, 1, "data")


def test_a_start_refuses_it_and_training_seeds(
    data_config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open_example is what every start calls first; open_data gives the seeded items."""
    (tmp_path / "drawing_items.py").write_text(
        "import itertools, random, torch\n"
        "import numpy as np\n"
        "class Items:\n"
        "    def __init__(self, own): self.count = itertools.count() if own else None\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n"
        "        return {'x': torch.randn(2) + (next(self.count) if self.count else 0)}\n"
        "def items(own): return Items(own)\n"
        "class Chosen(Items):\n"
        "    def __init__(self):\n"
        "        self.count = None\n"
        "        self.x = [torch.randperm(99), torch.tensor(np.random.rand(99)), random.random()]\n"
        "    def __getitem__(self, i): return {'x': self.x[0][:8] + self.x[1][:8] + self.x[2]}\n"
        "def chosen(): return Chosen()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    stateful = data_config(python="drawing_items:items", kwargs={"own": True})
    with pytest.raises(ConfigError, match="no function of its index"):
        open_example(stateful, model_vocabulary=None)
    config = data_config(python="drawing_items:items", kwargs={"own": False}, micro_batch=2)
    open_example(config, model_vocabulary=None)
    one, two = (
        open_data(config, seed=5, run_dir=tmp_path / name, model_vocabulary=None)
        for name in ("one", "two")
    )
    two.batch(2, 0)
    held_out = EvalConfig(python="drawing_items:items", kwargs={"own": False}, every=1)
    drawn = [
        open_eval(held_out, config, run_dir=tmp_path / name, model_vocabulary=None).batch(1, 0)
        for name in ("one", "two")
    ]
    assert same(*drawn)
    chosen = data_config(python="drawing_items:chosen")
    found = []
    for number in range(2):
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        data = open_data(chosen, seed=0, run_dir=tmp_path / f"c{number}", model_vocabulary=None)
        found.append(data.batch(1, 0))
    assert same(*found)
    assert same(one.batch(1, 0), two.batch(1, 0))
