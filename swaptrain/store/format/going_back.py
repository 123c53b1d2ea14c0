"""The record of a run that is going back to a snapshot, until it is there."""

from __future__ import annotations

from typing import ClassVar

from swaptrain.store.format.schema import Record, Whole

__all__ = ["GoingBackRecord"]


class GoingBackRecord(Record):
    """Content of `RUN/going-back.json`."""

    title: ClassVar[str] = "the record of a run that is going back"
    step: Whole
    """Step of the snapshot that becomes the live state."""
