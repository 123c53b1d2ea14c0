"""Sizes, counts and durations as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swaptrain.errors import ConfigError
from swaptrain.units import (
    GIB,
    MIB,
    exact_size,
    format_count,
    format_duration,
    format_size,
    format_wear,
    how_many,
    parse_size,
    roomy_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("64KiB", 65536),
        ("1.5GiB", 1610612736),
        ("100MB", 100_000_000),
        ("2 GB", 2 * 10**9),
        ("1TiB", 2**40),
        (" .5gib ", 2**29),
        ("4096B", 4096),
        ("0.3KiB", 307),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size_bytes: int) -> None:
    """GiB is 2^30, GB is 10^9, and case and spaces do not matter."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (4, "say 4GiB"),
        ("4", "say 4GiB"),
        (1.5, "say 1.5GiB"),
        ("4G", "say 4GiB"),
        ("4 parsecs", "unknown unit 'parsecs'"),
        ("-4GiB", "is not a size"),
        ("GiB", "is not a size"),
        ("", "is not a size"),
        ("1e3GiB", "unknown unit|is not a size"),
        (True, "is not a size"),
        ("٤GiB", "is not a size"),
    ],
)
def test_sizes_without_a_clear_unit_are_refused(text: str | int | float, hint: str) -> None:
    """A bare number, an unknown unit or something else is refused, saying what to write."""
    with pytest.raises(ConfigError, match=hint):
        parse_size(text)


@given(st.integers(0, 2**62))
def test_exact_size_reads_back(size_bytes: int) -> None:
    """What is written into a config is read back to the byte."""
    assert parse_size(exact_size(size_bytes)) == size_bytes


@given(st.integers(1, 2**50))
def test_roomy_size_is_enough_and_not_much_more(size_bytes: int) -> None:
    """A size that a message recommends is never too small, and at most a tenth GiB too large."""
    recommended = parse_size(roomy_size(size_bytes))
    assert size_bytes <= recommended <= size_bytes + max(MIB, GIB // 10 + 1)


@given(st.integers(1, 2**50))
def test_shown_sizes_never_reach_the_next_unit(size_bytes: int) -> None:
    """No size is shown as 1024.0 of a unit that has a larger one."""
    number, unit = format_size(size_bytes).split(" ")
    value = float(number.replace(",", ""))
    assert unit == "GiB" or value < 1024
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert value * scale == pytest.approx(size_bytes, abs=0.0501 * scale)


def test_shown_sizes_counts_and_durations() -> None:
    """The forms that the documentation shows."""
    assert format_size(4 * GIB) == "4.0 GiB"
    assert format_size(512 * MIB) == "512.0 MiB"
    assert format_size(1023.99 * MIB) == "1.0 GiB"
    assert format_size(17) == "17 B"
    assert format_size(0) == "0 B"
    assert format_count(1640) == "1,640"
    assert format_count(2_600_000_000) == "2.60 B"
    assert format_count(999_999) == "1.00 M"
    assert format_wear(15.24e12) == "15.24 TB" and format_wear(84e9) == "84.0 GB"
    assert format_wear(99.94e6) == "99.9 MB" and format_wear(99.95e6) == "0.1 GB"
    assert how_many(1, "segment") == "1 segment" and how_many(0, "segment") == "0 segments"
    assert how_many(1640, "step") == "1,640 steps"
    assert how_many(1, "batch", "batches") == "1 batch"
    assert how_many(2, "batch", "batches") == "2 batches"
    assert format_duration(0.0032) == "3.2 ms"
    assert format_duration(41.2) == "41.2 s"
    assert format_duration(750) == "12.5 min"
    assert format_duration(2.1 * 3600) == "2.1 h"
    assert format_duration(3.4 * 86400) == "3.4 d"
    assert format_duration(float("inf")) == "unknown"
