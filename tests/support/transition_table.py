"""Tables of states and transitions: as docstrings show them, and as a run applies them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

__all__ = ["Transition", "documented", "recorded"]

Transition = tuple[str, str, str]
"""An event, the state before it, and the state after it."""

_ROW = re.compile(r"^    ([a-z][a-z ]*?) {2,}([a-z]+(?:, [a-z]+)*) {2,}([a-z]+)$", re.MULTILINE)


def documented(docstring: str | None) -> dict[str, dict[str, str]]:
    """Return a docstring's table: by event, the state after it by the state before it."""
    rows = [row for row in _ROW.findall(docstring or "") if row != ("event", "from", "to")]
    table: dict[str, dict[str, str]] = {}
    for event, before, after in rows:
        table.setdefault(event, {}).update(dict.fromkeys(before.split(", "), after))
    return table


@contextmanager
def recorded(record_type: Any, state: str) -> Iterator[Counter[Transition]]:
    """Count the transitions that `apply` of a type of records makes during a `with` block.

    Fails where the attribute `state` of a record changed by anything but `apply`.
    """
    seen: Counter[Transition] = Counter()
    known: dict[int, tuple[Any, str]] = {}
    """By id: a record, held so that the id stays its own, and its state after its last event."""
    original = record_type.apply

    def apply(record: Any, event: str) -> None:
        before = getattr(record, state)
        assert known.get(id(record), (record, before))[1] == before, record
        original(record, event)
        after = getattr(record, state)
        known[id(record)] = record, after
        seen[event, before, after] += 1

    with patch.object(record_type, "apply", apply):
        yield seen
    for record, after in known.values():
        assert getattr(record, state) == after, record
