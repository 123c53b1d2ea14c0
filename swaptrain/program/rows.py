"""Which row of its file a gradient lies in."""

from __future__ import annotations

from collections.abc import Sequence

from swaptrain.program.instructions import ObjectKey
from swaptrain.program.model import ModelSpec

__all__ = ["row_turn"]


def row_turn(model: ModelSpec, key: ObjectKey) -> int:
    """Return 0 or 1, in turn by reader: neighbouring readers of a value use different rows.

    So the gradient that a segment hands on never overwrites the one that it started from, which
    the last durable commit may name.
    """
    if key.name in model.values:
        readers: Sequence[int] = model.values[key.name].readers
    else:
        name = key.name.removeprefix("parameter.")
        readers = [segment.index for segment in model.segments if name in segment.parameters]
    return readers.index(key.segment) % 2
