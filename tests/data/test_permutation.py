"""The shuffled order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaptrain.data.permutation import permuted


def order(length: int, *, seed: int, epoch: int) -> list[int]:
    return [permuted(position, length, seed=seed, epoch=epoch) for position in range(length)]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 300),
    seed=st.integers(-(2**63), 2**65),
    epoch=st.integers(0, 2**40),
)
def test_every_item_comes_exactly_once(length: int, seed: int, epoch: int) -> None:
    """The permutation is a bijection of the items, whatever their number, the seed, the epoch."""
    assert sorted(order(length, seed=seed, epoch=epoch)) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """Sixteen (seed, epoch) pairs give sixteen orders of 100 items."""
    orders = {tuple(order(100, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_items_are_spread_evenly() -> None:
    """Over 2,000 epochs each of 5 items takes each place about equally often (within 5 sigma)."""
    counts = [[0] * 5 for _ in range(5)]
    for epoch in range(2000):
        for position, item in enumerate(order(5, seed=3, epoch=epoch)):
            counts[position][item] += 1
    assert all(abs(count - 400) < 5 * 18 for row in counts for count in row)


def test_large_lengths_stay_inside() -> None:
    """A length above 2**40 works without anything of that size."""
    length = 2**41 + 7
    found = {permuted(position, length, seed=1, epoch=0) for position in range(200)}
    assert len(found) == 200
    assert all(0 <= item < length for item in found)


def test_positions_outside_are_refused() -> None:
    """A position beyond the length is an error, not another item."""
    with pytest.raises(IndexError):
        permuted(5, 5, seed=0, epoch=0)


def test_the_order_is_fixed_for_good() -> None:
    """The order of a seed never changes between versions: a resumed run depends on it."""
    assert order(10, seed=0, epoch=0) == [2, 0, 5, 1, 4, 6, 7, 8, 3, 9]
