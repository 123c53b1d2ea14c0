"""The RAM tier under a disk that answers late, out of order, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swaptrain.memory.pages import PagePool
from swaptrain.memory.pinned import PinnedPool
from swaptrain.memory.slab import PAGE_BYTES, Pool, PoolExhausted, Slab
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from tests.support.traffic import simulate

STATES = [ObjectKey(Kind.STATE, "weights", k) for k in range(1, 5)]
VALUES = [ObjectKey(Kind.VALUE, "v", k, m) for k in range(1, 4) for m in range(2)]
PAGES = {key: 1 + i % 3 for i, key in enumerate((*STATES, *VALUES))}
BUDGET_PAGES = 9


class LateHome:
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
def waits_complete(home: LateHome) -> Iterator[None]:
    """Let a wait of the tier complete the transfers it waits for."""
    home.completes = True
    try:
        yield
    finally:
        home.completes = False


class TierMachine(RuleBasedStateMachine):
    """Random instructions against a dict of what every object should contain."""

    @staticmethod
    def pool_of(budget_bytes: int) -> Pool:
        return PagePool(budget_bytes)

    @initialize()
    def start(self) -> None:
        self.home = LateHome()
        self.pool = self.pool_of(BUDGET_PAGES * PAGE_BYTES)
        self.tier = Tier(self.pool, self.home, self.home.wait)
        self.model: dict[ObjectKey, int] = {}
        self.stamps = count(1)
        self.commit: tuple[Future[Any], ObjectKey, bytes] | None = None
        for key in STATES:
            self.model[key] = next(self.stamps) % 251
            self.home.contents[key] = bytes([self.model[key]]) * self.home.size_bytes(key)

    def instruction(self, choices: list[int]) -> Instruction:
        """Make an instruction that fits the pool: what exists is read or changed, else written."""
        roles: dict[str, list[ObjectKey]] = {"reads": [], "changes": [], "writes": []}
        pages = 0
        for choice in choices:
            key = (*STATES, *VALUES)[choice % len(PAGES)]
            if any(key in keys for keys in roles.values()) or pages + PAGES[key] > BUDGET_PAGES:
                continue
            pages += PAGES[key]
            if key not in self.model:
                roles["writes"].append(key)
            else:
                roles["changes" if choice // len(PAGES) % 2 else "reads"].append(key)
        touched = [key for keys in roles.values() for key in keys]
        frees = [
            key for key, c in zip(touched, choices, strict=False)
            if key.kind is not Kind.STATE and c % 3 == 0
        ]  # fmt: skip
        return Instruction(
            Operation.FORWARD, 1, 0, **{role: tuple(keys) for role, keys in roles.items()},
            frees=tuple(frees),
        )  # fmt: skip

    @rule(
        plans=st.lists(
            st.lists(st.integers(0, 999), min_size=1, max_size=5), min_size=1, max_size=4
        ),
        ahead=st.booleans(),
        behind=st.booleans(),
    )
    def run(self, plans: list[list[int]], ahead: bool, behind: bool) -> None:
        """Run a few instructions as the executor does; each finds what was last written."""
        with waits_complete(self.home):
            for plan in plans:
                current = self.instruction(plan)
                following = tuple(
                    Instruction(Operation.FORWARD, 1, 0, reads=tuple(self.model)[i : i + 2])
                    for i in range(3)
                )
                self.tier.follow((current, *following))
                slabs = self.tier.acquire(current, 0)
                if ahead:
                    self.tier.prefetch(0)
                    self.check_budget()
                for key in current.needs:
                    expected = bytes([self.model[key]]) * len(slabs[key].memory)
                    assert bytes(slabs[key].memory) == expected, key
                for key in (*current.changes, *current.writes):
                    self.model[key] = next(self.stamps) % 251
                    slabs[key].memory[:] = bytes([self.model[key]]) * len(slabs[key].memory)
                self.tier.release(current)
                for key in current.frees:
                    del self.model[key]
                if behind:
                    self.tier.write_behind(0)
                self.check_budget()

    @precondition(lambda self: self.commit is None)
    @rule(which=st.sampled_from(STATES))
    def begin_commit(self, which: ObjectKey) -> None:
        """Let a commit take an object's content as it is, while the program may read it."""
        instruction = Instruction(Operation.UPDATE, 1, changes=(which,))
        with waits_complete(self.home):
            self.tier.follow((instruction,))
            slab = self.tier.acquire(instruction, 0)[which]
            self.model[which] = next(self.stamps) % 251
            slab.memory[:] = bytes([self.model[which]]) * len(slab.memory)
            done: Future[Any] = Future()
            self.home.pending.append((done, which, slab, "write"))
            self.tier.saving([which], done)
            self.tier.release(instruction)
        self.commit = (done, which, bytes(slab.memory))

    @precondition(lambda self: self.commit is not None)
    @rule()
    def end_commit(self) -> None:
        """What a commit wrote is what the object contained when it began."""
        assert self.commit is not None
        done, key, content = self.commit
        found = [i for i, (f, *_) in enumerate(self.home.pending) if f is done]
        if found:
            slab = self.home.pending[found[0]][2]
            assert bytes(slab.memory) == content, f"{key} was changed while it was saved"
            self.home.complete(found[0])
        self.commit = None

    @precondition(lambda self: self.home.pending)
    @rule(data=st.data())
    def transfer(self, data: st.DataObject) -> None:
        """One pending transfer happens, in any order."""
        self.home.complete(data.draw(st.integers(0, len(self.home.pending) - 1)))

    @rule()
    def drain(self) -> None:
        """Afterwards nothing is under way."""
        with waits_complete(self.home):
            self.tier.drain()
        assert not self.home.pending

    @invariant()
    def check_budget(self) -> None:
        """Held bytes never pass the budget."""
        if hasattr(self, "pool"):
            assert self.pool.held_bytes <= self.pool.budget_bytes

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every object is in memory, on the disk, or on its way there."""
        if hasattr(self, "tier"):
            for key in self.model:
                assert key in self.tier.resident() or self.home.holds(key), key


class PinnedTierMachine(TierMachine):
    """The same on memory whose holes have to be large enough: no instruction is refused for it."""

    @staticmethod
    def pool_of(budget_bytes: int) -> Pool:
        return PinnedPool(budget_bytes, lambda *_: None, lambda *_: None)


TestTier = TierMachine.TestCase
TestTier.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestPinnedTier = PinnedTierMachine.TestCase
TestPinnedTier.settings = TestTier.settings


def one(operation: Operation = Operation.FORWARD, **roles: tuple[ObjectKey, ...]) -> Instruction:
    return Instruction(operation, 1, 0, **roles)


def tier_of(pages: int) -> tuple[Tier, LateHome, Pool]:
    home = LateHome()
    pool = PagePool(pages * PAGE_BYTES)
    for key in STATES:
        home.contents[key] = bytes([key.segment]) * home.size_bytes(key)
    return Tier(pool, home, home.wait), home, pool


def test_an_error_of_a_read_reaches_the_main_line() -> None:
    """A read that fails raises its own error where the object is acquired."""
    tier, home, _ = tier_of(4)
    home.failure = OSError("flipped")
    with waits_complete(home), pytest.raises(OSError, match="flipped"):
        tier.acquire(one(reads=(STATES[0],)), 0)


def test_an_error_of_a_write_reaches_the_main_line_and_the_object_stays() -> None:
    """A spill that fails raises, again at every later call, and its object stays in memory."""
    tier, home, _ = tier_of(PAGES[VALUES[0]])
    write, other = one(writes=(VALUES[0],)), one(reads=(STATES[0],))
    tier.follow((write, other, one(reads=(VALUES[0],))))
    with waits_complete(home):
        tier.acquire(write, 0)[VALUES[0]].memory[:1] = b"x"
        tier.release(write)
        tier.write_behind(0)
        home.failure = OSError("disk full")
        home.complete(0)
        for _ in range(2):
            with pytest.raises(OSError, match="disk full"):
                tier.drain()
            with pytest.raises(OSError, match="disk full"):
                tier.acquire(one(reads=(STATES[0],)), 0)
    assert VALUES[0] in tier.resident()
    assert bytes(tier.in_memory(VALUES[0]).memory[:1]) == b"x"


def test_an_object_freed_while_it_is_written_gives_its_slab_back_when_the_write_ends() -> None:
    """Its slab stays until the write is done; the same key can be made anew."""
    key = VALUES[0]
    tier, home, pool = tier_of(PAGES[key])
    with waits_complete(home):
        tier.follow((one(writes=(key,)), one(reads=(STATES[0],))))
        tier.acquire(one(writes=(key,)), 0)
        tier.release(one(writes=(key,)))
        tier.write_behind(0)
        tier.free(key)
        assert pool.live_bytes == home.size_bytes(key)
        assert key not in tier.resident()
        again = one(writes=(key,))
        tier.acquire(again, 0)[key].memory[:1] = b"n"
        tier.release(again)
        tier.drain()
        assert pool.live_bytes == home.size_bytes(key)
        assert bytes(tier.in_memory(key).memory[:1]) == b"n"


def test_saving_objects_are_read_at_once_and_changed_only_when_saved() -> None:
    """A reader does not wait for a commit that is under way; who changes the object does."""
    tier, home, _ = tier_of(4)
    key = STATES[0]
    with waits_complete(home):
        slab = tier.acquire(one(changes=(key,)), 0)[key]
        done: Future[Any] = Future()
        home.pending.append((done, key, slab, "write"))
        tier.saving([key], done)
        tier.release(one(changes=(key,)))
        tier.acquire(one(reads=(key,)), 0)
        tier.release(one(reads=(key,)))
        assert not done.done()
        tier.acquire(one(changes=(key,)), 0)
        assert done.done()


def test_what_cannot_fit_is_refused_with_the_number() -> None:
    """An instruction larger than the pool names what is missing."""
    tier, home, _ = tier_of(2)
    with waits_complete(home), pytest.raises(PoolExhausted, match="raise memory"):
        tier.acquire(one(reads=tuple(STATES)), 0)


def test_a_view_that_is_about_to_go_is_waited_for() -> None:
    """A thread that has read or written lets go of its slab a moment behind its future."""
    tier, home, _ = tier_of(PAGES[STATES[0]] + PAGES[STATES[1]] - 1)
    first = one(reads=(STATES[0],))
    with waits_complete(home):
        slabs = tier.acquire(first, 0)
        views = [slabs[STATES[0]].memory]
        del slabs
        tier.release(first)
        threading.Timer(0.02, views.clear).start()
        slabs = tier.acquire(one(reads=(STATES[1],)), 1)
    assert not views
    assert bytes(slabs[STATES[1]].memory) == home.contents[STATES[1]]


def test_reading_ahead_costs_no_more_than_the_plan() -> None:
    """In a sweep that goes round, what is read ahead does not push out what is needed next."""
    keys = [ObjectKey(Kind.STATE, f"part{i}", 1) for i in range(20)]
    home = LateHome()
    home.contents = {key: bytes(PAGE_BYTES) for key in keys}
    home.size_bytes = lambda _: PAGE_BYTES  # type: ignore[method-assign]
    pool = PagePool(10 * PAGE_BYTES)
    tier = Tier(pool, home, home.wait)
    sweep = tuple(one(reads=(key,)) for key in keys)
    with waits_complete(home):
        for _ in range(4):
            before = tier.counters.missed_bytes
            tier.follow(sweep, sweep)
            for position, instruction in enumerate(sweep):
                tier.acquire(instruction, position)
                tier.prefetch(position)
                tier.release(instruction)
                tier.write_behind(position)
                for index in reversed(range(len(home.pending))):
                    home.complete(index)
    least = simulate(sweep, home.size_bytes, 9 * PAGE_BYTES, durable=lambda _: (), rounds=4)
    assert tier.counters.missed_bytes - before <= least.read_bytes < 20 * PAGE_BYTES


@given(st.lists(st.integers(0, len(PAGES) - 1), min_size=3), st.integers(4, 7))
def test_what_was_in_memory_is_looked_for_again_when_it_had_to_leave(
    touched: list[int], pages: int
) -> None:
    """Prefetch goes on where something was missing; from the beginning it would find no more."""
    keys = [(*STATES, *VALUES)[i] for i in touched]
    made = [key.kind is Kind.VALUE and key not in keys[:i] for i, key in enumerate(keys)]
    program = tuple(
        one(writes=(key,)) if fresh else one(reads=(key,))
        for key, fresh in zip(keys, made, strict=True)
    )
    found: list[list[list[ObjectKey]]] = []
    for from_the_beginning in (False, True):
        tier, home, _ = tier_of(pages)
        tier.follow(program)
        found.append([])
        with waits_complete(home):
            for position, instruction in enumerate(program):
                tier.acquire(instruction, position)
                if from_the_beginning:
                    tier._entries.whole_to = 0
                tier.prefetch(position)
                found[-1].append(sorted(tier.resident()))
                tier.release(instruction)
    assert found[0] == found[1]


def test_prefetch_stays_in_the_budget_when_a_view_of_an_evicted_object_lives_on() -> None:
    """Bytes that a forgotten view keeps alive count; a prefetch then waits for its turn."""
    tier, home, pool = tier_of(4)
    program = tuple(one(reads=(STATES[i],)) for i in (1, 0, 2))
    with waits_complete(home):
        tier.follow(program)
        view = tier.acquire(program[0], 0)[STATES[1]].memory
        tier.release(program[0])
        tier.acquire(program[1], 1)
        tier.prefetch(1)
        assert STATES[2] not in tier.resident()
        assert pool.held_bytes <= pool.budget_bytes
        del view
        tier.prefetch(1)
        assert STATES[2] in tier.resident()
