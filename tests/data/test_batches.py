"""Step numbers to micro-batches, and what datasets may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from swaptrain.data.batches import Batches
from swaptrain.errors import ConfigError, RunError


class Listed:
    """A dataset of given items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def numbered(
    length: int, *, shuffle: bool = False, micro_batch: int = 2, micro_batches: int = 3
) -> Batches:
    return over(
        [{"x": torch.tensor([index])} for index in range(length)],
        shuffle=shuffle,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
    )


def over(
    items: list[Any], *, shuffle: bool = False, micro_batch: int = 1, micro_batches: int = 1
) -> Batches:
    return opened(
        Listed(items), shuffle=shuffle, micro_batch=micro_batch, micro_batches=micro_batches
    )


def opened(
    dataset: Listed,
    *,
    shuffle: bool = False,
    micro_batch: int = 1,
    micro_batches: int = 1,
    expect: Callable[[int], None] | None = None,
) -> Batches:
    return Batches(
        dataset,
        name="data.python",
        digest="",
        seed=7,
        shuffle=shuffle,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        expect=expect,
    )


def test_without_shuffle_items_come_in_order_and_wrap() -> None:
    """Micro-batch m of step s holds ((s-1) M + m) B and following, modulo the length."""
    batches = numbered(7)
    assert batches.items(1, 0) == [0, 1]
    assert batches.items(1, 2) == [4, 5]
    assert batches.items(2, 0) == [6, 0]
    assert batches.items(3, 1) == [0, 1]
    assert batches.batch(2, 0)["x"].tolist() == [[6], [0]]


def test_shuffled_epochs_hold_each_item_once() -> None:
    """Any length-many consecutive positions from an epoch's start hold every item once."""
    batches = numbered(9, shuffle=True, micro_batch=3, micro_batches=1)
    epochs = [
        [item for step in range(3 * e + 1, 3 * e + 4) for item in batches.items(step, 0)]
        for e in range(4)
    ]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_how_positions_are_cut_into_micro_batches_does_not_change_their_order() -> None:
    """3 micro-batches of 2 hold what 1 micro-batch of 6 holds."""
    many, one = numbered(50, shuffle=True), numbered(50, shuffle=True, micro_batch=6)
    for step in (1, 2, 9):
        parts = [item for m in range(3) for item in many.items(step, m)]
        whole = numbered(50, shuffle=True, micro_batch=6, micro_batches=1).items(step, 0)
        assert parts == whole
    assert one.tokens_per_micro_batch == 6


def test_what_will_be_asked_for_is_expected_once_and_before_it_is_read() -> None:
    """Each item of the coming micro-batches, in their order; elsewhere it begins anew."""
    said: list[str] = []

    class Read(Listed):
        def __getitem__(self, index: int) -> Any:
            said.append(f"read {index}")
            return {"x": index}

    def expect(index: int) -> None:
        said.append(f"expect {index}")

    batches = opened(Read([0] * 1000), shuffle=True, micro_batch=4, micro_batches=2, expect=expect)
    said.clear()
    for step in range(1, 21):
        for m in range(2):
            batches.batch(step, m)
            assert [f"read {item}" for item in batches.items(step, m)] == said[-4:]
    expected = [line for line in said if line.startswith("expect ")]
    read = [line for line in said if line.startswith("read ")]
    assert expected[: len(read)] == [line.replace("read", "expect") for line in read]
    assert len(expected) < len(read) + 100
    for line in set(read):
        assert said.index(line.replace("read", "expect")) < said.index(line)
    batches.batch(90, 1)
    assert said[-5].startswith("expect ")
    assert said[-4:] == [f"read {item}" for item in batches.items(90, 1)]
    assert f"expect {batches.items(90, 1)[0]}" in said


def test_numbers_and_arrays_become_tensors() -> None:
    """Numbers, NumPy arrays (read-only and reversed too) and tensors are stacked by key."""
    array = np.arange(3, dtype=np.float32)[::-1]
    array.flags.writeable = False
    batch = over([{"n": 3, "f": 0.5, "b": True, "a": array, "t": torch.ones(2)}] * 2).example()
    assert {key: (value.dtype, tuple(value.shape)) for key, value in batch.items()} == {
        "n": (torch.int64, (1,)),
        "f": (torch.float32, (1,)),
        "b": (torch.bool, (1,)),
        "a": (torch.float32, (1, 3)),
        "t": (torch.float32, (1, 2)),
    }
    assert batch["a"].tolist() == [[2.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    "item", [{"x": torch.ones(3)}, {"x": torch.ones(2, dtype=torch.int64)}, {"y": torch.ones(2)}]
)
def test_an_item_unlike_the_first_is_refused_with_its_index(item: dict[str, Any]) -> None:
    """Other shapes, dtypes or keys: RunError during the run, ConfigError at the start."""
    first = {"x": torch.ones(2)}
    batches = over([first, first, item])
    assert batches.example()["x"].shape == (1, 2)
    with pytest.raises(RunError, match=r"item 2 of data.python"):
        batches.batch(3, 0)
    with pytest.raises(ConfigError, match=r"item 1 of data.python"):
        over([first, item], micro_batch=2).example()


@pytest.mark.parametrize(
    "item",
    [torch.ones(2), {}, {"x": "text"}, {"x": {"y": torch.ones(1)}}, {3: torch.ones(1)}, None],
)
def test_items_that_are_not_dicts_of_tensors_are_refused(item: Any) -> None:
    """Tuples, nested dicts and texts are refused when the data is opened."""
    with pytest.raises(ConfigError, match=r"item 0"):
        over([item])


def test_an_item_that_cannot_be_read_names_its_index() -> None:
    """An exception inside the dataset is told with the item, and its cause is kept."""

    class Broken(Listed):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise ZeroDivisionError("no such picture")
            return {"x": 1}

    batches = opened(Broken([0, 0]))
    with pytest.raises(RunError, match=r"item 1 of data.python.*no such picture") as caught:
        batches.batch(2, 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_no_items_are_refused() -> None:
    """An empty dataset is a ConfigError."""
    with pytest.raises(ConfigError, match="no items"):
        over([])


@pytest.mark.parametrize("wrong", [lambda b: b.items(0, 0), lambda b: b.items(1, 3)])
def test_steps_count_from_1(wrong: Callable[[Batches], Any]) -> None:
    """Step 0 and a micro-batch beyond the step are programming errors."""
    with pytest.raises(IndexError):
        wrong(numbered(5))
