"""The learning rate follows the documented formulas."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swaptrain.compute.learning_rate import Schedule, learning_rate
from swaptrain.errors import ConfigError

NAMES = ["constant", "linear", "cosine", "wsd"]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_rises_in_equal_parts_to_the_full_rate(name: str) -> None:
    """Step s of W warmup steps has s/W of the rate, and step W all of it."""
    schedule = Schedule(name, warmup_steps=4, decay_steps=20)
    rates = [learning_rate(step, lr=0.8, schedule=schedule) for step in (1, 2, 3, 4)]
    assert rates == [0.2, 0.4, pytest.approx(0.6), 0.8]


@pytest.mark.parametrize(
    ("name", "middle", "end"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.1 + 0.9 * 0.5, 0.1),
        ("cosine", 0.1 + 0.9 * 0.5, 0.1),
        ("wsd", 1.0, 0.1),
    ],
)
def test_factor_in_the_middle_at_the_end_and_after_it(name: str, middle: float, end: float) -> None:
    """Half way and at decay_steps the factors are the formulas', and later the floor stays."""
    schedule = Schedule(name, warmup_steps=10, decay_steps=110, min_lr_ratio=0.1)
    assert learning_rate(60, lr=1.0, schedule=schedule) == pytest.approx(middle, abs=1e-15)
    assert learning_rate(110, lr=1.0, schedule=schedule) == pytest.approx(end, abs=1e-15)
    assert learning_rate(500, lr=1.0, schedule=schedule) == pytest.approx(end, abs=1e-15)


def test_cosine_and_wsd_at_other_points() -> None:
    """A quarter of the cosine, and the middle of wsd's decay over the last fifth."""
    cosine = Schedule("cosine", decay_steps=100)
    assert learning_rate(25, lr=2.0, schedule=cosine) == pytest.approx(1 + math.cos(math.pi / 4))
    wsd = Schedule("wsd", decay_steps=100)
    assert learning_rate(80, lr=2.0, schedule=wsd) == 2.0
    assert learning_rate(90, lr=2.0, schedule=wsd) == pytest.approx(1.0)


@given(
    name=st.sampled_from(NAMES),
    warmup_steps=st.integers(0, 50),
    decay_steps=st.integers(1, 100),
    floor=st.floats(0, 1),
    fraction=st.floats(0, 1),
)
def test_after_the_warmup_the_rate_never_rises_nor_passes_its_bounds(
    name: str, warmup_steps: int, decay_steps: int, floor: float, fraction: float
) -> None:
    """Any schedule, even a warmup longer than the decay, falls from lr to lr * floor."""
    schedule = Schedule(name, warmup_steps, decay_steps, floor, fraction)
    rates = [
        learning_rate(step, lr=1.0, schedule=schedule)
        for step in range(max(1, warmup_steps), warmup_steps + decay_steps + 3)
    ]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates))
    assert all(floor - 1e-12 <= rate <= 1 for rate in rates)


def test_what_is_missing_or_unknown_is_named() -> None:
    """A decaying schedule without an end and an unknown name are refused with their keys."""
    with pytest.raises(ConfigError, match=r"decay_steps.*cosine"):
        learning_rate(1, lr=1.0, schedule=Schedule("cosine"))
    with pytest.raises(ConfigError, match=r"schedule\.name.*'cosin'"):
        learning_rate(1, lr=1.0, schedule=Schedule("cosin", decay_steps=5))
    assert learning_rate(9, lr=1.0, schedule=Schedule()) == 1.0
