"""Which of the two buffers of its file a gradient lies in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from swaptrain.program.instructions import ObjectKey, Of
from swaptrain.program.model import ModelSpec

__all__ = ["buffer_index"]


def buffer_index(model: ModelSpec, key: ObjectKey) -> int:
    """Return 0 or 1, alternating from reader to reader: those with a commit between them differ.

    So the gradient that a segment hands on never overwrites the one that it started from, which
    the last durable commit may name. Readers without a commit between them share a
    buffer: only what the last of them makes is handed on.
    """
    readers: Sequence[int] = ()
    if key.of is Of.PARAMETER:
        readers = [segment.index for segment in model.segments if key.name in segment.parameters]
    elif key.name in model.values:
        readers = model.values[key.name].readers
    commits = [segment.index for segment in model.segments if model.has_state(segment)]
    readers.index(key.segment)  # raises ValueError
    commits_before = sorted({bisect_right(commits, reader) for reader in readers})
    return commits_before.index(bisect_right(commits, key.segment)) % 2
