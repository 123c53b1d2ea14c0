"""What a file of rows came to, counted while its tokens were made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from swaptrain.units import how_many

__all__ = ["Report"]


@dataclass
class Report:
    """Counts of rows and of tokens."""

    rows: int = 0
    """Taken: without those that were dropped."""
    tokens: int = 0
    """Of the rows taken, as far as they fit."""
    trained: int = 0
    """Tokens of which the prediction is trained."""
    longest: int = 0
    """Tokens of the longest row, before it was cut."""
    truncated: int = 0
    """Rows of more tokens than a sequence."""
    dropped: int = 0
    """Rows in which no token is trained."""
    altered: int = 0
    """Rows with a message that the chat template leaves out or writes otherwise."""
    sequences: int = 0
    """Items that the rows were laid into."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Report:
        """Return a report that `fields` recorded; raises TypeError."""
        found = cls(**fields)
        if any(type(value) is not int or value < 0 for value in asdict(found).values()):
            raise TypeError("a count is no whole number")
        return found

    def fields(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)

    def add(self, row_tokens: int, taken: int, trained: int) -> None:
        """Count a row of so many tokens, of which so many are taken and trained."""
        self.rows += 1
        self.tokens += taken
        self.trained += trained
        self.longest = max(self.longest, row_tokens)
        self.truncated += taken < row_tokens

    def line(self, sequence_length: int) -> str:
        """Say it in one line."""
        full = self.tokens / max(1, self.sequences * sequence_length)
        text = (
            f"{how_many(self.rows, 'row')}, {how_many(self.tokens, 'token')}, {self.trained:,} of "
            f"them trained; the longest row has {self.longest:,}; "
            f"{how_many(self.sequences, 'sequence')} of {sequence_length:,}, {full:.0%} full"
        )
        if self.truncated:
            text += f"; longer than a sequence, and cut: {how_many(self.truncated, 'row')}"
        if self.altered:
            text += (
                f"; in {how_many(self.altered, 'row')} the chat template leaves a message out, or "
                "writes it otherwise"
            )
        if self.dropped:
            text += f"; with nothing to train, and left out: {how_many(self.dropped, 'row')}"
        return text
