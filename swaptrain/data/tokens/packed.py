"""Tokens packed into sequences of one length: the items of a language model."""

# T sequence length

from __future__ import annotations

import torch

from swaptrain.data.tokens.token_files import TokenSource

__all__ = ["PackedTokens"]


class PackedTokens:
    """Item i is tokens [i T, (i + 1) T) of the source; the last partial sequence is dropped."""

    def __init__(self, source: TokenSource, sequence_length: int) -> None:
        self._source, self._sequence_length = source, sequence_length

    def __len__(self) -> int:
        """Return the number of whole sequences."""
        return len(self._source) // self._sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return equal input_ids and labels, int64 [T]: models shift the labels themselves."""
        start = index * self._sequence_length
        ids = torch.from_numpy(self._source.read(start, start + self._sequence_length))
        return {"input_ids": ids, "labels": ids}

    def expect(self, index: int) -> None:
        """Begin to read an item that will be asked for."""
        start = index * self._sequence_length
        self._source.expect(start, start + self._sequence_length)
