"""Mappings: pages that move keep their content, and never take more memory than they should."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import swaptrain.memory.mapping as module
from swaptrain.memory.mapping import PAGE_BYTES, Mapping
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import Slab
from swaptrain.observe.memory_usage import resident_bytes

HUGE = 2 * 2**20
SMALL = 2**17
NOISE = 2**20
POPULATE = 23
"""MADV_POPULATE_WRITE."""


def filled(nbytes: int, mark: int) -> Mapping:
    mapping = Mapping(nbytes)
    mapping.populate()
    mapping.view()[:] = mark
    return mapping


def moved(nbytes: int, spare: Iterable[Mapping]) -> Mapping:
    """Return a resident mapping with pages of `spare`; all else of these is given back."""
    mapping = Mapping(nbytes)
    for source in spare:
        mapping.take_pages(source)
        source.drop_pages(source.resident_bytes)
    mapping.populate()
    return mapping


needs_moves = pytest.mark.skipif(
    not Mapping(HUGE).take_pages(filled(HUGE, 1)),
    reason="the kernel moves no pages (MREMAP_DONTUNMAP, Linux 5.7)",
)


@needs_moves
def test_pages_move_with_their_content() -> None:
    joined = Mapping(6 * HUGE + SMALL)
    first, second = filled(3 * HUGE + 2 * SMALL, 1), filled(4 * HUGE, 2)
    assert joined.take_pages(first)
    assert joined.take_pages(second)
    assert joined.is_resident
    assert joined.address % HUGE == 0
    view = joined.view()
    assert (view[: 3 * HUGE] == 1).all()
    assert (view[3 * HUGE : 6 * HUGE] == 2).all()
    assert (view[6 * HUGE :] == 1).all()
    assert (first.resident_bytes, second.resident_bytes) == (SMALL, HUGE)
    # What came from two mappings is moved on in two pieces, and what is left keeps its own.
    again = Mapping(4 * HUGE)
    assert again.take_pages(joined)
    assert (again.view()[: 3 * HUGE] == 2).all()
    assert (again.view()[3 * HUGE :] == 1).all()
    assert joined.resident_bytes == 2 * HUGE + SMALL
    assert (joined.view()[: 2 * HUGE] == 1).all()
    joined.populate()
    joined.view()[:] = 3
    assert (again.view()[: 3 * HUGE] == 2).all()
    second.populate()
    assert (second.view()[:HUGE] == 2).all()


@needs_moves
def test_pages_of_both_sizes_move_and_need_not_be_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slabs of odd sizes take each other's place for as long as one likes."""
    populated: list[int] = []

    class Noted(mmap.mmap):
        def madvise(self, advice: int, start: int = 0, nbytes: int = 0) -> None:
            if advice == POPULATE:
                populated.append(nbytes)
            super().madvise(advice, start, nbytes or len(self) - start)

    monkeypatch.setattr(mmap, "mmap", Noted)
    sizes = (3 * HUGE + 5 * SMALL, 2 * HUGE + 9 * SMALL, 3 * SMALL, 7 * HUGE + PAGE_BYTES)
    pool = PagePool(8 * HUGE + SMALL)
    for size in sizes:
        pool.give(pool.take(size))
    assert populated
    populated.clear()
    for _ in range(5):
        for size in sizes:
            pool.give(pool.take(size))
    assert sum(populated) <= 5 * len(sizes) * PAGE_BYTES


def resident_of(mappings: Iterable[Mapping]) -> int:
    """Return the bytes of pages of mappings, as the kernel counts them, and of nobody else."""
    page_map = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        entries = [
            np.frombuffer(
                os.pread(page_map, m.nbytes // PAGE_BYTES * 8, m.address // PAGE_BYTES * 8),
                np.uint64,
            )
            for m in mappings
        ]
    finally:
        os.close(page_map)
    return PAGE_BYTES * sum(int(np.count_nonzero(e >> np.uint64(63))) for e in entries)


def test_moving_takes_no_more_memory_than_the_larger_one() -> None:
    spare = [filled(16 * HUGE, mark) for mark in range(4)]
    assert resident_of(spare) == 64 * HUGE
    small = moved(20 * HUGE, spare)
    assert resident_of([*spare, small]) == 20 * HUGE
    large = moved(50 * HUGE, [small])
    assert resident_of([*spare, small, large]) == 50 * HUGE
    large.view()[:] = 7
    assert resident_of([*spare, small, large]) == 50 * HUGE


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, HUGE - PAGE_BYTES, HUGE, 5 * HUGE + 3 * PAGE_BYTES])
def test_a_kernel_that_does_not_move_pages_gives_new_ones(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(module, "kernel_calls", lambda: None)
    source = filled(4 * HUGE + SMALL, 9)
    mapping = Mapping(nbytes)
    assert not mapping.take_pages(source) or nbytes < SMALL
    assert source.resident_bytes == source.nbytes
    mapping.populate()
    assert not mapping.view().any()
    assert mapping.view().size == nbytes
    pool = PagePool(3 * HUGE)
    for pages in (2 * HUGE, HUGE + SMALL, nbytes % HUGE or HUGE):
        pool.give(pool.take(pages))
        assert pool.held_bytes <= 3 * HUGE


def test_pages_are_given_back_up_to_the_bytes_that_are_asked_for() -> None:
    mapping = filled(4 * HUGE + SMALL, 6)
    before_bytes = resident_bytes()
    mapping.drop_pages(PAGE_BYTES)
    assert mapping.resident_bytes == 4 * HUGE + SMALL - PAGE_BYTES
    mapping.drop_pages(SMALL)
    assert mapping.resident_bytes == 3 * HUGE
    assert resident_bytes() <= before_bytes - HUGE - SMALL + NOISE
    mapping.populate()
    assert (mapping.view()[: 3 * HUGE] == 6).all()
    assert not mapping.view()[3 * HUGE :].any()
    mapping.drop_pages(1 << 40)
    assert not mapping.resident_bytes


def test_many_sizes_in_turn_keep_their_own_content() -> None:
    random = np.random.default_rng(0)
    held = {mark: filled(int(random.integers(1, 9)) * HUGE, mark) for mark in range(8)}
    for mark in range(8, 200):
        spare = [held.pop(int(random.choice(list(held)))) for _ in range(2)]
        pages = int(random.integers(1, sum(m.nbytes for m in spare) // PAGE_BYTES))
        held[mark] = Mapping(pages * PAGE_BYTES)
        for source in spare:
            held[mark].take_pages(source)
        held[1000 + mark] = spare[0]
        spare[1].close()
        for key in (mark, 1000 + mark):
            held[key].populate()
            held[key].view()[:] = key % 251
        if len(held) > 8:
            held.pop(min(held)).close()
        assert all((m.view() == key % 251).all() for key, m in held.items())


def test_a_move_that_fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = module.kernel_calls(), iter(range(100))
    assert real is not None
    calls = SimpleNamespace(
        mremap=lambda *given: real.mremap(*given) if next(count) < 2 else -1, mmap=real.mmap
    )
    monkeypatch.setattr(module, "kernel_calls", lambda: calls)
    spare = [filled(2 * HUGE, mark) for mark in (1, 2, 3, 4)]
    mapping = Mapping(6 * HUGE)
    taken = [mapping.take_pages(source) for source in spare]
    assert taken[2:] == [False, False]
    mapping.populate()
    mapping.view()[:] = 5
    assert (mapping.view() == 5).all()
    assert (spare[3].view() == 4).all()


def test_pieces_are_bounded() -> None:
    mapping = filled(HUGE, 0)
    for _ in range(100):
        mapping = moved(mapping.nbytes + HUGE, [mapping, filled(HUGE, 0)])
        assert len(mapping._huge.pieces) <= module._MOST_PIECES + 1


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, 3 * HUGE + PAGE_BYTES])
def test_without_memory_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, advice: int, start: int = 0, nbytes: int = 0) -> None:
            if advice == POPULATE:
                raise OSError(errno.ENOMEM, "no memory")
            super().madvise(advice, start, nbytes or len(self) - start)

    pool = PagePool(4 * HUGE)
    pool.give(pool.take(4 * HUGE))
    before_bytes = resident_bytes()
    monkeypatch.setattr(mmap, "mmap", Refusing)
    with pytest.raises(OSError, match="no memory"):
        pool.take(nbytes)
    assert pool.live_bytes == 0
    assert resident_bytes() <= before_bytes - (nbytes // HUGE) * HUGE + NOISE
    assert pool.held_bytes <= 4 * HUGE - nbytes // HUGE * HUGE


def test_a_pool_that_was_shrunk_gives_memory_back() -> None:
    pool = PagePool(10 * HUGE)
    slabs = [pool.take(6 * HUGE), pool.take(4 * HUGE)]
    pool.shrink(5 * HUGE)
    for slab in slabs:
        pool.give(slab)
    assert pool.held_bytes <= 5 * HUGE
    taken = [pool.take(HUGE), pool.take(2 * HUGE), pool.take(PAGE_BYTES)]
    assert pool.held_bytes <= 5 * HUGE
    assert [slab.nbytes for slab in taken] == [HUGE, 2 * HUGE, PAGE_BYTES]


def test_what_is_kept_without_pages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swaptrain.memory.pages._MOST_SHELLS", 3)
    pool = PagePool(4 * HUGE)
    for pages in range(2, 40):
        pool.give(pool.take(pages * SMALL))
        assert len(pool._shells) <= 3
        assert pool.held_bytes <= 4 * HUGE
    pool.trim()
    assert not pool._shells
    assert pool.held_bytes == 0


@needs_moves
def test_the_kernel_s_areas_do_not_grow_in_number() -> None:
    """A process may have 65,530 of them, and a run takes slabs for weeks."""
    random = np.random.default_rng(0)
    sizes = [HUGE // 2] * 9 + [HUGE + PAGE_BYTES, 3 * HUGE, 3 * HUGE + SMALL]
    sizes += [3 * HUGE // 2 + extra for extra in (0, 0, PAGE_BYTES, PAGE_BYTES, 5 * SMALL)]
    sizes += [2 * HUGE + extra for extra in (0, PAGE_BYTES, 4 * PAGE_BYTES)]
    pool = PagePool(20 * HUGE)
    held: list[Slab] = []
    areas = []
    for turn in range(2000):
        size = sizes[int(random.integers(len(sizes)))]
        while pool.live_bytes + size > pool.budget_bytes:
            pool.give(held.pop(int(random.integers(len(held)))))
        held.append(pool.take(size))
        if turn in (800, 1999):
            areas.append(len(Path("/proc/self/maps").read_text().splitlines()))
    assert areas[1] <= areas[0] + 60


def test_where_addresses_are_limited_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swaptrain.memory.pages.address_space_bytes", lambda: 1 << 30)
    pool = PagePool(4 * HUGE)
    for pages in range(2, 40):
        pool.give(pool.take(pages * SMALL))
        assert not pool._shells
