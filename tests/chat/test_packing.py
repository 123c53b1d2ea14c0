"""Rows lie in sequences: each once and whole, as full as best fit makes them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swaptrain.chat import Packer, Report, decoded
from swaptrain.chat.packing import best_fit
from swaptrain.chat.tokens import Encoded

PAD_ID = 9


def row(ids: list[int], trained: list[int]) -> Encoded:
    """Return a row of tokens, with the places that are trained."""
    flags = np.zeros(len(ids), dtype=np.bool_)
    flags[trained] = True
    return Encoded(np.array(ids, dtype=np.uint32), flags)


def packed(rows: list[Encoded], length: int, *, several: bool) -> tuple[list[object], Report]:
    """Return ids, labels and positions of each sequence."""
    report = Report()
    packer = Packer(length, PAD_ID, report, several=several)
    found = [sequence for one in rows for sequence in packer.add(one)]
    found += packer.finish()
    return [
        [part.tolist() for part in decoded(sequence.astype(np.int64))] for sequence in found
    ], report


ROWS = [row([1, 2, 3], [1, 2]), row([4, 5], [1]), row([6, 7], []), row([1, 2, 3, 4, 5, 6], [2, 5])]


def test_each_row_has_a_sequence() -> None:
    """The rest is padding that is not trained; a row without trained tokens is left out."""
    found, report = packed(ROWS, 4, several=False)
    assert found == [
        [[1, 2, 3, 9], [-100, 2, 3, -100], [0, 1, 2, 0]],
        [[4, 5, 9, 9], [-100, 5, -100, -100], [0, 1, 0, 1]],
        [[1, 2, 3, 4], [-100, -100, 3, -100], [0, 1, 2, 3]],
    ]
    assert report == Report(
        rows=3, tokens=9, trained=4, longest=6, truncated=1, dropped=1, sequences=3
    )
    assert "75% full; longer than a sequence, and cut: 1 row" in report.line(4)


def test_rows_share_a_sequence() -> None:
    """Positions begin anew in each row, and in what is left."""
    found, report = packed(ROWS[:3], 6, several=True)
    assert found == [
        [[1, 2, 3, 4, 5, 9], [-100, 2, 3, -100, 5, -100], [0, 1, 2, 0, 1, 0]],
    ]
    assert report.sequences == 1


@given(st.lists(st.integers(1, 50), max_size=200))
def test_best_fit(lengths: list[int]) -> None:
    """Every item in one bin, no bin too full, and no two bins that one would hold."""
    bins = best_fit(lengths, 50)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    sums = sorted(sum(lengths[i] for i in members) for members in bins)
    assert all(total <= 50 for total in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > 50
