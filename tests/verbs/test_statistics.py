"""Figures of tensors that come in pieces, and differences between two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from swaptrain.errors import DamagedStoreError
from swaptrain.verbs.inspection.difference import compare_pieces
from swaptrain.verbs.inspection.differences import TensorDifference
from swaptrain.verbs.inspection.statistics import histogram, statistics

FLOATS = ("float32", "float32")


def cut(values: NDArray[Any], *sizes: int) -> Iterator[NDArray[Any]]:
    """Yield the elements in pieces of these sizes, then the rest."""
    flat = values.reshape(-1)
    for size in sizes:
        yield flat[:size]
        flat = flat[size:]
    yield flat


@pytest.mark.parametrize("sizes", [(), (1,), (0, 7, 500), (999,)])
def test_figures_are_those_of_numpy_whatever_the_pieces(sizes: tuple[int, ...]) -> None:
    """A mean far from zero does not cost the deviation its digits."""
    values = (1e4 + np.random.default_rng(0).normal(size=1000)).astype(np.float32)
    values[3:6] = 0
    found, wide = statistics(cut(values, *sizes)), values.astype(np.float64)
    assert (found.count, found.zeros, found.not_finite) == (1000, 3, 0)
    assert (found.least, found.most) == (wide.min(), wide.max())
    assert found.mean == pytest.approx(wide.mean(), rel=1e-12)
    assert found.std == pytest.approx(wide.std(), rel=1e-9)
    assert found.norm == pytest.approx(np.linalg.norm(wide), rel=1e-12)
    assert found.first == tuple(wide[:4]) and found.last == tuple(wide[-4:])


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    values = np.array([np.nan, 3, -np.inf, 0, 5, np.inf], np.float32)
    found = statistics(cut(values, 2))
    assert (found.nan, found.infinite, found.not_finite, found.zeros) == (1, 2, 3, 1)
    assert (found.least, found.most, found.mean) == (0, 5, pytest.approx(8 / 3))
    tree = found.tree()
    assert tree["first"] == [None, 3.0, None, 0.0] and tree["max"] == 5
    nothing = statistics([np.full(3, np.nan, np.float32)])
    assert (nothing.least, nothing.mean, nothing.std, nothing.norm) == (None,) * 4
    assert histogram([np.full(3, np.nan, np.float32)], nothing) is None


@pytest.mark.parametrize(
    ("values", "count"),
    [
        (np.array([], np.float32), 0),
        (np.array(2.5, np.float64), 1),
        (np.array([[True, False], [True, True]]), 4),
        (np.array([3, 4], np.int64), 2),
        (np.array([1.5, -2], ml_dtypes.bfloat16), 2),
        (np.array([3 + 4j], np.complex64), 2),
    ],
)
def test_every_dtype_has_figures(values: NDArray[Any], count: int) -> None:
    """Of complex elements both parts are taken, so that the norm is theirs."""
    found = statistics([values])
    assert found.count == count
    expected = np.linalg.norm(values.astype(complex).reshape(-1)) if count else None
    assert found.norm == (None if expected is None else pytest.approx(expected))


def test_a_histogram_counts_each_finite_element_once() -> None:
    values = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    values[7] = np.inf
    found = statistics([values])
    drawn = histogram(cut(values, 100, 2000), found)
    assert drawn is not None
    assert sum(drawn.counts) == 4999 and len(drawn.edges) == len(drawn.counts) + 1
    assert (drawn.edges[0], drawn.edges[-1]) == (found.least, found.most)
    good = values[np.isfinite(values)].astype(np.float64)
    assert list(drawn.counts) == list(np.histogram(good, np.array(drawn.edges))[0])
    assert histogram([np.ones(3)], statistics([np.ones(3)])) is None  # one number


def test_a_histogram_of_the_widest_range_does_not_overflow() -> None:
    largest = np.finfo(np.float64).max
    values = np.array([-largest, 0, largest])
    drawn = histogram([values], statistics([values]))
    assert drawn is not None and sum(drawn.counts) == 3
    assert all(math.isfinite(edge) for edge in drawn.edges)


def compared(
    left: NDArray[Any], right: NDArray[Any], *sizes: int, dtypes: tuple[str, str] = FLOATS
) -> TensorDifference | None:
    """Compare two tensors, of which the second one comes in pieces."""
    return compare_pieces("w", left.shape, [left], cut(right, *sizes), dtypes)


def test_a_difference_says_how_many_and_how_much() -> None:
    left = np.array([3, 4, 0, 0], np.float32)
    right = np.array([3, 4.5, 0, -1], np.float32)
    found = compared(left, right, 1, 2)
    assert found is not None
    assert (found.elements, found.differing, found.largest) == (4, 2, 1.0)
    assert found.relative == pytest.approx(math.sqrt(0.25 + 1) / 5)
    assert compared(left, left.copy(), 3) is None


def test_bits_count_not_numbers() -> None:
    """-0 differs from 0 though the numbers are equal; the same NaN on both sides is equal."""
    left = np.array([0.0, np.nan], np.float32)
    assert compared(left, left.copy()) is None
    found = compared(left, np.array([-0.0, np.nan], np.float32))
    assert found is not None
    assert (found.differing, found.largest, found.relative, found.not_finite) == (1, 0.0, None, 0)


def test_numbers_that_are_not_finite_are_counted() -> None:
    left = np.array([1, np.nan, np.inf, 2], np.float32)
    right = np.array([np.nan, 1, np.inf, 2.5], np.float32)
    found = compared(left, right)
    assert found is not None
    assert (found.differing, found.not_finite, found.largest) == (3, 2, 0.5)


def test_other_dtypes_are_equal_where_the_numbers_are() -> None:
    wide = np.array([1.5, -2], np.float64)
    assert compared(wide, wide.astype(np.float32), dtypes=("float64", "float32")) is None
    found = compared(wide, wide.astype(np.float32) + 1, dtypes=("float64", "float32"))
    assert found is not None and found.differing == 2


def test_too_few_elements_are_damage() -> None:
    with pytest.raises(DamagedStoreError, match="fewer elements"):
        compared(np.ones(3, np.float32), np.ones(2, np.float32))


def test_the_largest_difference_comes_first() -> None:
    def one(name: str, **fields: Any) -> TensorDifference:
        return TensorDifference(name, ((2,), (2,)), FLOATS, **fields)

    shapes = TensorDifference("shapes", ((2,), (3,)), FLOATS)
    bad = one("bad", elements=2, differing=1, relative=0.1, not_finite=1)
    large = one("large", elements=2, differing=1, largest=1.0, relative=0.5)
    small = one("small", elements=2, differing=2, largest=2.0, relative=0.25)
    found = sorted([small, large, bad, shapes], key=TensorDifference.order)
    assert [tensor.name for tensor in found] == ["shapes", "bad", "large", "small"]
