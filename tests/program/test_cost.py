"""The price of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swaptrain.program.cost import (
    Disk,
    StateBytes,
    break_even_tokens,
    floor_s,
    least_traffic_bytes,
    useful_fraction,
)
from swaptrain.program.model import ModelSpec, SegmentSpec

P = 10**9
SPLIT = StateBytes(weights=2 * P, rest=10 * P)
K = 3 * 10**8

caches = st.integers(0, 20 * P)


def model(flops: list[int]) -> ModelSpec:
    """Return a model whose segments have these flops and nothing else."""
    segments = tuple(
        SegmentSpec(k, 0, (), (), (), (), (), 0, count, "-") for k, count in enumerate(flops, 1)
    )
    return ModelSpec({}, {}, {}, segments, "loss", "")


@given(cache=caches, m=st.integers(1, 100))
def test_the_bound_is_the_formula_of_the_design(cache: int, m: int) -> None:
    """Split master: 26 P - (3 - 1/m) min(C, 2P) - (2 - 1/m) max(0, min(C, 12P) - 2P) + 2K."""
    formula = (
        26 * P
        - (3 - 1 / m) * min(cache, 2 * P)
        - (2 - 1 / m) * max(0, min(cache, 12 * P) - 2 * P)
        + 2 * K
        - 2 * min(K, max(0, cache - 12 * P))
    )
    assert least_traffic_bytes(SPLIT, K, cache, commit_every=m) == pytest.approx(formula)
    kept = formula + K + min(K, max(0, cache - 12 * P))
    inside = least_traffic_bytes(SPLIT, K, cache, commit_every=m, unit="segment")
    assert inside == pytest.approx(kept)


@given(cache=caches, more=caches, m=st.integers(1, 100))
def test_memory_never_costs_traffic(cache: int, more: int, m: int) -> None:
    """A larger cache or a rarer commit moves no more, and what must be written is written."""
    bound = least_traffic_bytes(SPLIT, K, cache, commit_every=m)
    assert least_traffic_bytes(SPLIT, K, cache + more, commit_every=m) <= bound + 1
    assert least_traffic_bytes(SPLIT, K, cache, commit_every=m + 1) <= bound + 1
    assert bound >= 12 * P / m - 1


@given(cache=caches, below=st.booleans())
def test_frozen_weights_are_only_read(cache: int, below: bool) -> None:
    """Twice, or once where nothing learns; what memory holds of them is not read."""
    frozen = StateBytes(0, 0, **{"frozen_below" if below else "frozen": 2 * P})
    times = 1 if below else 2
    expected = times * (2 * P - min(cache, 2 * P))
    assert least_traffic_bytes(frozen, 0, cache) == expected
    beside = StateBytes(2 * P, 10 * P, 0, 2 * P, 2 * P)
    assert least_traffic_bytes(beside, 0, 0) == (26 + 4 + 2) * P
    assert (beside.read_bytes, beside.write_bytes) == (20 * P, 12 * P)


def test_the_table_of_the_design() -> None:
    """26 P for a fused update, 34 P where float32 gradients wait for the norm, 28 P in float32."""
    assert least_traffic_bytes(SPLIT, 0, 0) == 26 * P
    assert least_traffic_bytes(StateBytes(2 * P, 10 * P, 4 * P), 0, 0) == 34 * P
    assert least_traffic_bytes(StateBytes(4 * P, 8 * P), 0, 0) == 28 * P


@given(read=st.integers(0, 10**12), write=st.integers(0, 10**12), more=st.integers(0, 10**12))
def test_a_disk_is_as_fast_as_measured(read: int, write: int, more: int) -> None:
    """The three measured mixes are met, and more bytes of one kind at equal speeds take longer."""
    disk = Disk(3e9, 2e9, 1e9)
    assert disk.seconds(read, 0) == pytest.approx(read / 3e9)
    assert disk.seconds(0, write) == pytest.approx(write / 2e9)
    assert disk.seconds(read, read) == pytest.approx(2 * read / 1e9)
    even = Disk(1e9, 1e9, 1e9)
    assert even.seconds(read + more, write) >= even.seconds(read, write)


def test_the_floor_is_the_slower_of_the_two() -> None:
    """I/O alone, or computing that I/O slows."""
    assert floor_s(10.0, 1.0, 0.2) == 10.0
    assert floor_s(1.0, 10.0, 0.2) == pytest.approx(10.2)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=20))
def test_recomputation_is_a_quarter_at_most(flops: list[int]) -> None:
    """One segment recomputes nothing; many equal ones a quarter of what they do, or save it."""
    fraction = useful_fraction(model(flops), ())
    assert 0.75 <= fraction <= 1
    assert useful_fraction(model(flops[:1]), ()) == 1
    assert useful_fraction(model([0] * 1000), ()) == pytest.approx(0.75, abs=1e-3)
    assert useful_fraction(model(flops), range(1, len(flops))) == 1
    assert fraction <= useful_fraction(model(flops), {1})
    assert fraction <= useful_fraction(model(flops), (), learning=range(2, len(flops) + 1))


def test_break_even_is_the_formula_of_the_design() -> None:
    """T* = 26 F / (8 BW): 54 thousand tokens at 100 TFLOP/s with 6 GB/s."""
    disk = Disk(6e9, 6e9, 6e9)
    tokens = break_even_tokens(SPLIT, 8 * P, 100e12, disk)
    assert tokens == pytest.approx(26 * 100e12 / (8 * 6e9), rel=1e-6)
    assert 54_000 < tokens < 54_500
