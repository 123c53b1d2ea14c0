"""Rows are laid into sequences of one length: several into one, or each into its own.

A place of a sequence is stored as one number: the id, and two bits. A sequence is thus read at one
place of the disk, and says itself which of its tokens are trained and where its rows begin.
"""

# T sequence length

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swaptrain.chat.report import Report
from swaptrain.chat.tokens import Encoded

__all__ = ["PAD", "Packer", "coded", "decoded"]

PAD = -100
"""The label of what is not trained."""
_TRAINED, _BEGINS, _BITS = 1, 2, 2
_WINDOW_TOKENS = 2**21
"""Tokens of the rows that wait for their place: 10 MB."""


def coded(ids: NDArray[np.uint32], trained: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return a row as it is stored, uint32 [tokens]: id * 4 + begins * 2 + trained."""
    values = (ids << _BITS) | trained
    values[:1] |= _BEGINS
    return values.astype(np.uint32)


def decoded(
    values: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return ids, labels and positions of a sequence, each int64 [T]; positions count in a row."""
    ids = values >> _BITS
    labels = np.where(values & _TRAINED, ids, PAD)
    places = np.arange(len(values))
    begins = np.where(values & _BEGINS, places, 0)
    return ids, labels, places - np.maximum.accumulate(begins)


class Packer:
    """Takes rows in order, and gives sequences of T places, in an order that follows from them.

    With `several` the rows of some two million tokens are laid by best fit, the longest first,
    each into the sequence that it fills most; without, each has its own. Rows are cut at T tokens;
    those in which nothing is trained are dropped. The rest of a sequence is padding.
    """

    def __init__(self, length: int, pad_id: int, report: Report, *, several: bool) -> None:
        self._length, self._several, self._report = length, several, report
        self._waiting: list[NDArray[np.uint32]] = []
        self._waiting_tokens = 0
        self._padding = coded(
            np.full(length, pad_id, dtype=np.uint32), np.zeros(length, dtype=np.bool_)
        )

    def add(self, row: Encoded) -> Iterator[NDArray[np.uint32]]:
        """Take a row; yield the sequences that are complete."""
        taken = min(len(row.ids), self._length)
        trained = int(row.trained[:taken].sum())
        if not trained:
            self._report.dropped += 1
            return
        self._report.add(len(row.ids), taken, trained)
        self._report.altered += row.altered
        self._waiting.append(coded(row.ids[:taken], row.trained[:taken]))
        self._waiting_tokens += taken
        if not self._several or self._waiting_tokens >= _WINDOW_TOKENS:
            yield from self.finish()

    def finish(self) -> Iterator[NDArray[np.uint32]]:
        """Yield the sequences of the rows that wait."""
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        for rows in best_fit([len(row) for row in waiting], self._length):
            places = [waiting[i] for i in rows]
            filled = sum(map(len, places))
            self._report.sequences += 1
            yield np.concatenate([*places, self._padding[: self._length - filled]])


def best_fit(lengths: list[int], most: int) -> list[list[int]]:
    """Return the items of each bin of size `most`: best fit decreasing.

    The longest item first, ties in order; into the bin that it leaves least room in, of several
    the one that was opened first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of a bin, and which: sorted
    for i in order:
        place = bisect_left(room, (lengths[i], 0))
        if place == len(room):
            bins.append([i])
            left, number = most - lengths[i], len(bins) - 1
        else:
            left, number = room.pop(place)
            bins[number].append(i)
            left -= lengths[i]
        if left:
            insort(room, (left, number))
    return bins
