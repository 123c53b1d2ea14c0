"""Puts other functions in places for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["holders_of", "replaced"]

Holder = tuple[Any, str]


def holders_of(functions: Sequence[Any]) -> list[list[Holder]]:
    """Return, for each function, the modules that hold it and under which name."""
    numbers = {id(function): i for i, function in enumerate(functions)}
    found: list[list[Holder]] = [[] for _ in functions]
    for module in list(sys.modules.values()):
        # Of dict itself: a lazy module answers getattr by importing things.
        for name, value in list(getattr(module, "__dict__", {}).items()):
            number = numbers.get(id(value))
            if number is not None:
                found[number].append((module, name))
    return found


@contextlib.contextmanager
def replaced(holders: Iterable[Holder], function: Any) -> Iterator[None]:
    """Set each (owner, name) to `function` inside the block, and put the old values back."""
    places = list(holders)
    originals = [vars(owner)[name] for owner, name in places]
    for owner, name in places:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
