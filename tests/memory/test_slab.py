"""The pool: held bytes never pass the budget, and no view ever changes under its holder."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swaptrain.memory import pages
from swaptrain.memory.mapping import Mapping
from swaptrain.memory.pages import PagePool
from swaptrain.memory.pinned import PinnedPool
from swaptrain.memory.slab import PAGE_BYTES, PoolExhausted, Slab, SlabPool


class PoolMachine(RuleBasedStateMachine):
    """Takes, gives back and keeps views of slabs of a small pool; each has its own content."""

    unit_bytes = PAGE_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.budget_bytes = 40 * self.unit_bytes
        self.pool: SlabPool = PagePool(self.budget_bytes)
        self.live: list[tuple[Slab, int]] = []
        self.views: list[tuple[torch.Tensor, int]] = []
        self.mark = 0

    @rule(units=st.integers(1, 20))
    def take(self, units: int) -> None:
        used_bytes, nbytes = self.pool.live_bytes, units * self.unit_bytes
        try:
            slab = self.pool.take(nbytes)
        except PoolExhausted:
            self.refused(used_bytes + nbytes)
            return
        assert used_bytes + nbytes <= self.budget_bytes
        self.mark = self.mark % 255 + 1
        slab.tensor(torch.uint8, slab.nbytes).fill_(self.mark)
        self.live.append((slab, self.mark))

    def refused(self, wanted_bytes: int) -> None:
        assert wanted_bytes > self.budget_bytes

    @rule(which=st.integers(0, 1000), keep_view=st.booleans())
    def give(self, which: int, keep_view: bool) -> None:
        if self.live:
            slab, mark = self.live.pop(which % len(self.live))
            if keep_view:
                self.views.append((slab.tensor(torch.uint8, slab.nbytes), mark))
            self.pool.give(slab)

    @rule()
    def drop_view(self) -> None:
        if self.views:
            self.views.pop(0)

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.pool.held_bytes == self.pool.live_bytes

    @rule(units=st.integers(20, 40))
    def shrink(self, units: int) -> None:
        self.budget_bytes = min(self.budget_bytes, units * self.unit_bytes)
        self.pool.shrink(self.budget_bytes)

    @invariant()
    def budget_holds_and_contents_stay(self) -> None:
        viewed_bytes = sum(view.numel() for view, _ in self.views)
        assert self.pool.live_bytes == sum(s.nbytes for s, _ in self.live) + viewed_bytes
        assert self.pool.live_bytes <= self.pool.held_bytes
        self.held()
        for slab, mark in self.live:
            assert set(slab.memory[:: slab.nbytes - 1]) == {mark}
        for view, mark in self.views:
            assert view[0] == view[-1] == mark

    def held(self) -> None:
        assert self.pool.held_bytes <= max(self.budget_bytes, self.pool.live_bytes)


class MovingPoolMachine(PoolMachine):
    """The same where pages go from slab to slab, huge ones and small ones."""

    unit_bytes = 2**17


class PinnedPoolMachine(PoolMachine):
    """The same in one pinned region, whose slabs are moved together, and whose end is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned_bytes = 0
        self.pool = PinnedPool(self.budget_bytes, self.pin, self.unpin)

    def pin(self, address: int, nbytes: int) -> None:
        assert address % PAGE_BYTES == 0
        assert not self.pinned_bytes
        self.pinned_bytes = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        assert self.pinned_bytes == nbytes
        self.pinned_bytes = 0

    def refused(self, wanted_bytes: int) -> None:
        """Only where the bytes are not there, once what is in use has been moved together."""
        if wanted_bytes <= self.budget_bytes and not self.views:
            assert not self.pool.has_room(wanted_bytes - self.pool.live_bytes)
            assert self.pool.join(wanted_bytes - self.pool.live_bytes, self.budget_bytes)

    @rule()
    def trim(self) -> None:
        """All of it where nothing lies there; what is viewed would be counted no longer."""
        if not self.views:
            self.pool.trim()
            assert bool(self.pool.held_bytes) == bool(self.pool.live_bytes)

    def held(self) -> None:
        """No more than the budget where all that is in use may be moved together."""
        assert self.views or self.pool.held_bytes <= max(self.budget_bytes, self.pool.live_bytes)

    @rule(units=st.integers(1, 20), most_units=st.integers(0, 40))
    def join(self, units: int, most_units: int) -> None:
        nbytes = units * self.unit_bytes
        joined = self.pool.join(nbytes, most_units * self.unit_bytes)
        assert joined == self.pool.has_room(nbytes)

    @invariant()
    def what_is_held_is_pinned(self) -> None:
        assert self.pinned_bytes == self.pool.held_bytes


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMovingPool = MovingPoolMachine.TestCase
TestMovingPool.settings = TestPool.settings
TestPinnedPool = PinnedPoolMachine.TestCase
TestPinnedPool.settings = TestPool.settings


def test_a_slab_of_the_same_size_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given-back slab serves the next request of exactly its size, without a new mapping."""
    made: list[int] = []

    class Noted(Mapping):
        def __init__(self, nbytes: int) -> None:
            made.append(nbytes)
            super().__init__(nbytes)

    monkeypatch.setattr(pages, "Mapping", Noted)
    pool = PagePool(2**20)
    for _ in range(5):
        pool.give(pool.take(65536))
    assert made == [65536] == [pool.held_bytes]


def test_large_slabs_are_aligned_and_no_larger_than_asked() -> None:
    """From 2 MiB on, slabs start at huge pages, and only their own bytes become resident."""
    nbytes = 2**21 + 5 * PAGE_BYTES
    gc.collect()  # pools of the tests before
    before_bytes = _resident_bytes()
    pool = PagePool(40 * nbytes)
    slabs = [pool.take(nbytes) for _ in range(32)]
    assert all(slab.tensor(torch.uint8, 1).data_ptr() % 2**21 == 0 for slab in slabs)
    grown_bytes = _resident_bytes() - before_bytes
    assert 0.95 * 32 * nbytes < grown_bytes < 1.1 * 32 * nbytes
    for slab in slabs:
        pool.give(slab)
    pool.trim()
    del slabs
    gc.collect()
    assert _resident_bytes() - before_bytes < 4 * nbytes


def test_tensors_and_memory_share_bytes() -> None:
    """A tensor at an offset and the raw bytes are the same memory; an empty tensor works."""
    pool = PagePool(2**20)
    slab = pool.take(PAGE_BYTES)
    slab.tensor(torch.float32, 3, 128).copy_(torch.tensor([1.0, -2.0, 0.5]))
    assert np.frombuffer(slab.memory[128:140], np.float32).tolist() == [1.0, -2.0, 0.5]
    assert slab.tensor(torch.bfloat16, 0).numel() == 0


def test_misuse_is_refused() -> None:
    """Odd sizes, a second give and use after give are errors, not corruption."""
    pool = PagePool(2**20)
    with pytest.raises(ValueError, match="multiple of 4096"):
        pool.take(100)
    slab = pool.take(PAGE_BYTES)
    pool.give(slab)
    with pytest.raises(ValueError, match="given back"):
        pool.give(slab)
    with pytest.raises(ValueError, match="given back"):
        slab.tensor(torch.uint8, 1)


def test_the_refusal_says_what_is_missing() -> None:
    """An exhausted pool names the bytes needed, used and missing, and the key to set."""
    pool = PagePool(10 * PAGE_BYTES)
    slab = pool.take(6 * PAGE_BYTES)
    with pytest.raises(PoolExhausted, match=r"20\.0 KiB .* 24\.0 KiB .* memory\.host by 4\.0 KiB"):
        pool.take(5 * PAGE_BYTES)
    pool.give(slab)


def test_tuned_malloc_keeps_freed_blocks() -> None:
    """After `tune`, a large block that is freed and allocated again faults no pages in."""
    code = """
import ctypes, resource
from swaptrain.memory.malloc import retain, trim, tune
tune(); retain()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
start = faults()
for _ in range(5):
    touch()
kept = faults() - start
trim()
start = faults()
touch()
print(kept, faults() - start)
import sys
assert "torch" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, trimmed = map(int, run.stdout.split())
    assert kept < 100
    assert trimmed > 0 or not sys.platform.startswith("linux")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
