"""Sequences that rows were laid into: the items of training on conversations."""

# T sequence length

from __future__ import annotations

import torch

from swaptrain.chat import decoded
from swaptrain.data.tokens.token_files import TokenSource

__all__ = ["RowSequences"]


class RowSequences:
    """Item i is the i-th sequence; `several`: rows share a sequence, and positions start anew."""

    def __init__(self, source: TokenSource, sequence_length: int, *, several: bool) -> None:
        self._source, self._length, self._several = source, sequence_length, several

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._source) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return input_ids and labels, int64 [T], -100 where nothing is trained.

        With several rows in a sequence also position_ids, int64 [T], which begin at 0 in each: by
        these a model of transformers keeps its attention within a row.
        """
        start = index * self._length
        ids, labels, positions = decoded(self._source.read(start, start + self._length))
        item = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self._several:
            item["position_ids"] = torch.from_numpy(positions)
        return item

    def expect(self, index: int) -> None:
        """Begin to read an item that will be asked for."""
        start = index * self._length
        self._source.expect(start, start + self._length)
