"""An attempt of all ranks to connect, under a name that no earlier attempt has had.

torchrun keeps one store over all its restarts. What a dead process has left there, such as the port
that it listened on, would be taken for the word of a living one: so all that the ranks say to each
other lies under the name of their attempt.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from swaptrain.errors import RunError
from swaptrain.program.ranks import Ranks
from swaptrain.units import format_duration, how_many

__all__ = ["Attempt", "meet"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_MOST_NAMED = 8


@dataclass(frozen=True)
class Attempt:
    """The processes that have met."""

    name: str
    """The same in all of them, and in no earlier attempt."""
    number: int
    """From 1, as far as the store goes back."""


def meet(store: Any, ranks: Ranks, timeout_s: float) -> Attempt:
    """Wait for the other ranks in torch's store; return what all of them call this attempt.

    Each rank leaves a word that it has drawn. Rank 0 calls all words, and calls them anew where one
    was that of a dead process. Each rank that hears its own word answers. When all have answered
    the same call, nobody in it is dead. Raises RunError where that takes longer than the timeout.
    """
    word = secrets.token_hex(8)
    store.set(f"here/{ranks.rank}", word)
    if ranks.rank:
        called = _follow(store, ranks, word, timeout_s)
    else:
        called = _lead(store, ranks, timeout_s)
        store.add("attempts", 1)
        store.set("begun", called)
    name = blake2b(called.encode(), digest_size=8).hexdigest()
    return Attempt(name, int(store.add("attempts", 0)))


def _lead(store: Any, ranks: Ranks, timeout_s: float) -> str:
    """Return the call that all other ranks have answered."""
    called, others = "", list(range(1, ranks.count))
    missing = others
    for _ in _tries(timeout_s):
        here = [_read(store, f"here/{rank}") for rank in range(ranks.count)]
        if called != (call := " ".join(here)):
            called = call
            store.set("called", called)
        missing = [rank for rank in others if _read(store, f"heard/{rank}") != called]
        if not missing:
            return called
    shown = ", ".join(map(str, missing[:_MOST_NAMED]))
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    raise RunError(
        f"rank 0 waited for {how_many(len(missing), 'rank')} ({shown}{more}), which did not come "
        f"within {format_duration(timeout_s)} (distributed.timeout): run the same command on all "
        "machines, and see whether they reach MASTER_ADDR"
    )


def _follow(store: Any, ranks: Ranks, word: str, timeout_s: float) -> str:
    """Answer the calls of rank 0 that have this rank's word; return the one that it begins with."""
    heard = ""
    for _ in _tries(timeout_s):
        called = _read(store, "called")
        words = called.split(" ")
        if len(words) != ranks.count or words[ranks.rank] != word:
            continue
        if called != heard:
            heard = called
            store.set(f"heard/{ranks.rank}", heard)
        if _read(store, "begun") == heard:
            return heard
    raise RunError(
        f"rank {ranks.rank} waited for the others, of which rank 0 or another one did not come "
        f"within {format_duration(timeout_s)} (distributed.timeout): run the same command on all "
        "machines"
    )


def _read(store: Any, key: str) -> str:
    """Return what lies under a key; empty where there is nothing."""
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


def _tries(timeout_s: float) -> Iterator[None]:
    """Yield at once, and then with longer and longer pauses, until the time is over."""
    until, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        yield
        if time.monotonic() > until:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
