"""Refuses ranks that were started with different things, by name, before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import swaptrain
from swaptrain.errors import ConfigError, SwaptrainError
from swaptrain.ranks.group import Group

__all__ = ["agree", "code_digest", "echoed", "in_all", "refuse"]

_SHOWN = 60
_MOST_NAMED = 5

_Found = TypeVar("_Found")


def agree(group: Group, what: str, own: Mapping[str, Any]) -> None:
    """Raise ConfigError, in all ranks, where one says something else than rank 0.

    `own` is JSON; the message names the first ranks and keys that differ, and both values.
    """
    said = group.gather(own)
    lines = []
    for rank, other in enumerate(said[1:], 1):
        for key, zeroth, there in _differences(said[0], other, ""):
            lines.append(f"rank {rank}: {key} is {_shown(there)}, and {_shown(zeroth)} in rank 0")
    refuse(what, lines)


def refuse(what: str, lines: Sequence[str]) -> None:
    """Raise ConfigError, in all ranks, where there are lines that say what differs."""
    if lines:
        text = f"the ranks were started with different {what}:\n  {_first(lines)}"
        raise echoed(ConfigError(text))


def in_all(group: Group, check: Callable[[], _Found]) -> _Found:
    """Return what `check` returns; where one rank refuses, raise ConfigError in all of them.

    The message has the words of each rank that refuses, once where all say the same.
    """
    found: list[_Found] = []
    words = None
    try:
        found.append(check())
    except ConfigError as error:
        words = str(error)
    said: list[str | None] = group.gather(words)
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    if lines:
        is_one = len(lines) == len(said) and len(set(said)) == 1
        raise echoed(ConfigError(said[0] if is_one else _first(lines)))
    return found[0]


def echoed(error: SwaptrainError) -> SwaptrainError:
    """Return an error that every rank raises, marked so that rank 0 alone says it."""
    error.is_echo = True
    return error


def code_digest() -> str:
    """Return a digest of this package's own files."""
    found = hashlib.blake2b(digest_size=16)
    package = Path(swaptrain.__file__).parent
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _first(lines: Sequence[str]) -> str:
    """Return the first lines as one text, and how many more there are."""
    shown = "\n  ".join(lines[:_MOST_NAMED])
    more = len(lines) - _MOST_NAMED
    return shown + (f"\n  and {more} more" if more > 0 else "")


def _differences(zeroth: Any, other: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(zeroth, dict) and isinstance(other, dict):
        for key in [*zeroth, *(key for key in other if key not in zeroth)]:
            inner = f"{name}.{key}" if name else str(key)
            yield from _differences(zeroth.get(key), other.get(key), inner)
    elif zeroth != other:
        yield name, zeroth, other


def _shown(value: Any) -> str:
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
