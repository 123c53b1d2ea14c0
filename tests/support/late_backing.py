"""A disk in memory whose transfers happen when a test says so, and tiers on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import PAGE_BYTES, Pool, Slab
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation

__all__ = ["PAGES", "STATES", "VALUES", "LateBacking", "one", "tier_of", "waits_complete"]

STATES = [ObjectKey(Kind.STATE, "weights", k) for k in range(1, 5)]
VALUES = [ObjectKey(Kind.VALUE, "v", k, m) for k in range(1, 4) for m in range(2)]
PAGES = {key: 1 + i % 3 for i, key in enumerate((*STATES, *VALUES))}


class LateBacking:
    """A disk in memory whose transfers happen when the test says so."""

    def __init__(self) -> None:
        self.contents: dict[ObjectKey, bytes] = {}
        self.pending: list[tuple[Future[Any], ObjectKey, Slab, str]] = []
        self.failure: OSError | None = None
        self.completes = False

    def size_bytes(self, key: ObjectKey) -> int:
        return PAGES[key] * PAGE_BYTES

    def holds(self, key: ObjectKey) -> bool:
        writing = any(k == key and what == "write" for _, k, _, what in self.pending)
        return key in self.contents or writing

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        return [self._submit(key, slab, "read")]

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        return [self._submit(key, slab, "write")]

    def forget(self, key: ObjectKey) -> None:
        if key.kind is not Kind.STATE:
            self.contents.pop(key, None)

    def complete(self, index: int) -> None:
        """Let one transfer happen, or fail."""
        future, key, slab, what = self.pending.pop(index)
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            if what == "read":
                slab.memory[:] = self.contents[key]
            else:
                self.contents[key] = bytes(slab.memory)
            future.set_result(None)

    def wait(self, fs: Sequence[Future[Any]], **_: object) -> None:
        """Complete the transfers that are waited for, the last submitted first."""
        assert self.completes, "nothing was to wait here"
        for future in reversed(fs):
            found = [i for i, (f, *_) in enumerate(self.pending) if f is future]
            if found:
                self.complete(found[0])

    def _submit(self, key: ObjectKey, slab: Slab, what: str) -> Future[Any]:
        future: Future[Any] = Future()
        self.pending.append((future, key, slab, what))
        return future


@contextmanager
def waits_complete(backing: LateBacking) -> Iterator[None]:
    """Let a wait of the tier complete the transfers it waits for."""
    backing.completes = True
    try:
        yield
    finally:
        backing.completes = False


def one(operation: Operation = Operation.FORWARD, **roles: tuple[ObjectKey, ...]) -> Instruction:
    return Instruction(operation, 1, 0, **roles)


def tier_of(pages: int) -> tuple[Tier, LateBacking, Pool]:
    backing = LateBacking()
    pool = PagePool(pages * PAGE_BYTES)
    for key in STATES:
        backing.contents[key] = bytes([key.segment]) * backing.size_bytes(key)
    return Tier(pool, backing, backing.wait), backing, pool
