"""Ranks meet under a name of their own, and what dead ones have left misleads nobody."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from swaptrain.errors import RunError
from swaptrain.program.ranks import Ranks
from swaptrain.ranks import last_words
from swaptrain.ranks.last_words import LastWords, Words
from swaptrain.ranks.launch import Launch
from swaptrain.ranks.meeting import Attempt, meet
from swaptrain.verbs import member

_LONG_S = 60.0


def come(pool: ThreadPoolExecutor, store: Any, rank: int, count: int = 3) -> Future[Attempt]:
    """Let one rank meet the others, on a thread."""
    return pool.submit(meet, store, Ranks(rank, count), _LONG_S)


def test_each_attempt_has_a_name_of_its_own() -> None:
    """All ranks of it have the same one, whoever comes first."""
    store: Any = dist.HashStore()
    found = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        with ThreadPoolExecutor(3) as pool:
            attempts = {one.result() for one in [come(pool, store, rank) for rank in order]}
        assert len(attempts) == 1
        found += attempts
    assert [attempt.number for attempt in found] == [1, 2, 3]
    assert len({attempt.name for attempt in found}) == 3


def test_the_words_of_dead_ranks_are_not_taken_for_those_of_living_ones() -> None:
    """Rank 2 left its word and died: the others wait until it is there again."""
    store: Any = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        [one.result() for one in [come(pool, store, rank) for rank in range(3)]]
        store.delete_key("heard/1")
        early = [come(pool, store, rank) for rank in range(2)]
        store.wait(["heard/1"])
        assert not any(one.done() for one in early)
        late = come(pool, store, 2)
        assert len({one.result() for one in [*early, late]}) == 1


@dataclass
class Told:
    """What a group says of the starts of its ranks."""

    starts: int
    others: list[list[int]]
    kept: bool

    def gather(self, said: Any) -> list[Any]:
        return [said, *self.others] if isinstance(said, list) else [said]

    def is_kept(self, mark: str) -> bool:
        return self.kept and bool(mark)


@pytest.mark.parametrize(
    ("restarts", "starts", "others", "kept", "begun"),
    [
        pytest.param(0, 1, [[0, 1]], False, False, id="the first start"),
        pytest.param(1, 2, [[0, 1]], False, False, id="the first one ended before it began anew"),
        pytest.param(1, 2, [[1, 2]], True, True, id="the first one began anew"),
        pytest.param(1, 1, [[1, 2]], False, True, id="a store that is younger"),
        pytest.param(0, 1, [[1, 1]], False, True, id="another rank's store is younger"),
    ],
)
def test_a_restart_begins_anew_only_where_none_before_it_did(
    restarts: int, starts: int, others: list[list[int]], kept: bool, begun: bool
) -> None:
    group: Any = Told(starts, others, kept)
    launch = Launch(Ranks(0, 2), 0, 2, restarts)
    assert member._has_begun_anew(group, launch) == begun


def test_who_did_not_come_is_named() -> None:
    """By rank 0, which knows; the others say that somebody is missing."""
    store: Any = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        some = [pool.submit(meet, store, Ranks(rank, 4), 0.3) for rank in (0, 1)]
        with pytest.raises(RunError, match=r"rank 0 waited for 2 ranks \(2, 3\), which did not"):
            some[0].result()
        with pytest.raises(RunError, match=r"rank 1 waited for the others.*distributed\.timeout"):
            some[1].result()


class _Silent:
    """A store behind a network that is cut: it never answers."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.end.wait()
        return False

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        self.end.wait()


def test_a_store_that_does_not_answer_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked once: the first question is still under way."""
    monkeypatch.setattr(last_words, "_ANSWER_S", 0.05)
    store = _Silent()
    words = LastWords(store, 0)
    assert words.of([1, 2]) == {}
    words.leave("a reason")
    assert words.of([1]) == {}
    assert store.asked == 1
    store.end.set()


def test_words_are_those_of_the_ranks_that_left_any() -> None:
    """And of no other attempt."""
    store: Any = dist.HashStore()
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # torch does not export it by name
    LastWords(prefixed("one", store), 1).leave("a disk is full")
    LastWords(prefixed("one", store), 2).leave("refuses: ends: x", refuses=True)
    found = LastWords(prefixed("one", store), 0).of([1, 2, 3])
    assert found == {1: Words("a disk is full", False), 2: Words("refuses: ends: x", True)}
    assert LastWords(prefixed("two", store), 0).of([1, 2]) == {}
