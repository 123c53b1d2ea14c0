"""Refuses ranks whose data has other content under the same config, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swaptrain.data.record import DataRecord
from swaptrain.data.sketches import is_alike
from swaptrain.ranks.agreement import refuse
from swaptrain.ranks.group import Group

__all__ = ["agree_on_data"]


def agree_on_data(group: Group, records: Mapping[str, DataRecord]) -> None:
    """Raise ConfigError, in all ranks, where one has other data than rank 0.

    `records` are by the section of the config. Of files all bytes are compared, of a Python dataset
    a few items: numbers in them may differ by the rounding of another machine.
    """
    own = {section: [of.digest, of.sketches] for section, of in records.items()}
    said = group.gather(own)
    lines = []
    for rank, there in enumerate(said[1:], 1):
        for section in said[0]:
            for words in _differences(said[0][section], there[section]):
                lines.append(f"rank {rank}: {section} has {words} in rank 0")
    refuse("data", lines)


def _differences(zeroth: list[Any], there: list[Any]) -> Iterator[str]:
    """Yield what is other in the data of two ranks, each a digest and sketches of items."""
    if zeroth[0] != there[0]:
        yield "other files, another tokenizer, or another length or layout of its items than"
        return
    for number, before in zeroth[1].items():
        now = there[1].get(number)
        if now is None:
            continue  # this rank took too long to read it
        others = [key for key in before if not is_alike(before[key], now.get(key))]
        if others:
            yield f"other values in {', '.join(others)} of item {number} than"
