"""The RAM tier against a model of it: any instructions, under a disk that answers in any order."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swaptrain.memory.entry import Entry
from swaptrain.memory.pages import PagePool
from swaptrain.memory.pinned import PinnedPool
from swaptrain.memory.slab import PAGE_BYTES, Pool
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from tests.support.late_backing import PAGES, STATES, VALUES, LateBacking, waits_complete
from tests.support.transition_table import recorded

BUDGET_PAGES = 9


class TierMachine(RuleBasedStateMachine):
    """Random instructions against a dict of what every object should contain."""

    @staticmethod
    def pool_of(budget_bytes: int) -> Pool:
        return PagePool(budget_bytes)

    @initialize()
    def start(self) -> None:
        self.recording = recorded(Entry, "content")
        self.recording.__enter__()
        self.backing = LateBacking()
        self.pool = self.pool_of(BUDGET_PAGES * PAGE_BYTES)
        self.tier = Tier(self.pool, self.backing, self.backing.wait)
        self.model: dict[ObjectKey, int] = {}
        self.stamps = count(1)
        self.commit: tuple[Future[Any], ObjectKey, bytes] | None = None
        for key in STATES:
            self.model[key] = next(self.stamps) % 251
            self.backing.contents[key] = bytes([self.model[key]]) * self.backing.size_bytes(key)

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
        with waits_complete(self.backing):
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
        with waits_complete(self.backing):
            self.tier.follow((instruction,))
            slab = self.tier.acquire(instruction, 0)[which]
            self.model[which] = next(self.stamps) % 251
            slab.memory[:] = bytes([self.model[which]]) * len(slab.memory)
            done: Future[Any] = Future()
            self.backing.pending.append((done, which, slab, "write"))
            self.tier.saving([which], done)
            self.tier.release(instruction)
        self.commit = (done, which, bytes(slab.memory))

    @precondition(lambda self: self.commit is not None)
    @rule()
    def end_commit(self) -> None:
        """What a commit wrote is what the object contained when it began."""
        assert self.commit is not None
        done, key, content = self.commit
        found = [i for i, (f, *_) in enumerate(self.backing.pending) if f is done]
        if found:
            slab = self.backing.pending[found[0]][2]
            assert bytes(slab.memory) == content, f"{key} was changed while it was saved"
            self.backing.complete(found[0])
        self.commit = None

    @precondition(lambda self: self.backing.pending)
    @rule(data=st.data())
    def transfer(self, data: st.DataObject) -> None:
        """One pending transfer happens, in any order."""
        self.backing.complete(data.draw(st.integers(0, len(self.backing.pending) - 1)))

    @rule()
    def drain(self) -> None:
        """Afterwards nothing is under way."""
        with waits_complete(self.backing):
            self.tier.drain()
        assert not self.backing.pending

    def teardown(self) -> None:
        """No state of an object changed but by a transition of the table."""
        if hasattr(self, "recording"):
            self.recording.__exit__(None, None, None)

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
                assert key in self.tier.resident() or self.backing.holds(key), key


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
