"""Why ranks ended, in their own words, as far as the network still brings them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

__all__ = ["LastWords", "Words"]

_MOST_CHARACTERS = 2000
_REFUSES, _ENDS = "refuses: ", "ends: "
_ANSWER_S = 5.0
"""For which the store is waited for: over a network that is cut it may never answer."""

_Answer = TypeVar("_Answer")


class Words(NamedTuple):
    """Why a rank ended."""

    text: str
    refuses: bool
    """Whether it refused the input: then so do the others."""


class LastWords:
    """What the ranks of one attempt leave in torch's store when they end."""

    def __init__(self, store: Any, rank: int) -> None:
        """`store` is that of the attempt; words of earlier ones are not in it."""
        self._store, self._rank = store, rank
        self._answers = True

    def leave(self, words: str, *, refuses: bool = False) -> None:
        """Say why this rank ends; `refuses`: since the input is not right."""
        said = (_REFUSES if refuses else _ENDS) + shortened(words)
        self._ask(lambda: self._store.set(f"ended/{self._rank}", said))

    def of(self, ranks: Iterable[int]) -> dict[int, Words]:
        """Return the words of those of these ranks that have left any, in this order."""

        def found() -> dict[int, Words]:
            there = [rank for rank in ranks if self._store.check([f"ended/{rank}"])]
            said = {r: self._store.get(f"ended/{r}").decode(errors="replace") for r in there}
            return {
                rank: Words(text.partition(": ")[2], text.startswith(_REFUSES))
                for rank, text in said.items()
            }

        return self._ask(found) or {}

    def _ask(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """Return what the store answers; None where it does not, in time or at all.

        On a thread, since torch's client waits for as long as the connection does. One that did not
        answer is not asked again: its client is still waiting.
        """
        if not self._answers:
            return None
        answers: SimpleQueue[_Answer | None] = SimpleQueue()

        def asking() -> None:
            answer = None
            try:
                with suppress(RuntimeError):
                    answer = ask()
            finally:
                answers.put(answer)

        try:
            threading.Thread(target=asking, name="last words", daemon=True).start()
        except RuntimeError:  # no room for a thread
            return None
        try:
            return answers.get(timeout=_ANSWER_S)
        except Empty:
            self._answers = False
            return None


def shortened(words: str) -> str:
    """Return as much of a message as is left for others."""
    return words[:_MOST_CHARACTERS]
