"""Mappings: pages that move keep their content, and never take more memory than they should."""

from __future__ import annotations

import errno

import numpy as np
import pytest

import swaptrain.memory.mapping as module
from swaptrain.memory.mapping import PAGE_BYTES, Mapping, resident
from swaptrain.memory.slab import Pool
from swaptrain.observe.memory_usage import resident_bytes

HUGE = 2 * 2**20
NOISE = 2**20


def filled(nbytes: int, mark: int) -> Mapping:
    mapping, _ = resident(nbytes)
    mapping.view()[:] = mark
    return mapping


def moves_pages() -> bool:
    mapping, _ = resident(HUGE, [filled(HUGE, 1)])
    return bool(mapping.view()[0])


needs_moves = pytest.mark.skipif(
    not moves_pages(), reason="the kernel moves no pages (MREMAP_DONTUNMAP, Linux 5.7)"
)


@needs_moves
def test_pages_move_with_their_content() -> None:
    joined, rest = resident(
        6 * HUGE + PAGE_BYTES,
        [filled(3 * HUGE + 8192, 1), filled(4 * HUGE, 2)],
        rest_bytes=HUGE + 8192,
    )
    assert rest is not None
    assert rest.nbytes == HUGE
    assert joined.address % HUGE == 0
    assert (joined.view()[: 3 * HUGE] == 1).all()
    assert (joined.view()[3 * HUGE : 6 * HUGE] == 2).all()
    # What came from two mappings is moved on in two pieces.
    again, rest = resident(4 * HUGE, [joined], rest_bytes=2 * HUGE)
    assert rest is not None
    assert rest.nbytes == 2 * HUGE
    assert (again.view()[: 3 * HUGE] == 1).all()
    assert (again.view()[3 * HUGE :] == 2).all()
    assert (rest.view() == 2).all()
    rest.view()[:] = 3
    assert (again.view()[3 * HUGE :] == 2).all()


def test_moving_takes_no_more_memory_than_the_larger_one() -> None:
    spare = [filled(16 * HUGE, mark) for mark in range(4)]
    before_bytes = resident_bytes()
    small, rest = resident(20 * HUGE, spare, rest_bytes=10 * HUGE)
    assert resident_bytes() <= before_bytes - 34 * HUGE + NOISE
    large, none = resident(50 * HUGE, [small] if rest is None else [small, rest])
    assert none is None
    assert resident_bytes() <= before_bytes - 14 * HUGE + NOISE
    large.view()[:] = 7
    assert resident_bytes() <= before_bytes - 14 * HUGE + NOISE


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, HUGE - PAGE_BYTES, HUGE, 5 * HUGE + 3 * PAGE_BYTES])
def test_a_kernel_that_does_not_move_pages_gives_new_ones(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(module, "_calls", lambda: None)
    mapping, rest = resident(
        nbytes, [filled(4 * HUGE, 9), filled(PAGE_BYTES, 9)], rest_bytes=2 * HUGE
    )
    assert rest is None
    assert not mapping.view().any()
    assert mapping.view().size == nbytes


def test_a_slab_without_huge_pages_leaves_the_rest_of_a_large_one() -> None:
    mapping, rest = resident(PAGE_BYTES, [filled(4 * HUGE, 9)], rest_bytes=4 * HUGE - 1)
    assert mapping.nbytes == PAGE_BYTES
    assert rest is None or rest.nbytes == 3 * HUGE


def test_many_sizes_in_turn_keep_their_own_content() -> None:
    random = np.random.default_rng(0)
    held = {mark: filled(int(random.integers(1, 9)) * HUGE, mark) for mark in range(8)}
    for mark in range(8, 200):
        spare = [held.pop(int(random.choice(list(held)))) for _ in range(2)]
        pages = int(random.integers(1, sum(m.nbytes for m in spare) // PAGE_BYTES))
        held[mark], rest = resident(pages * PAGE_BYTES, spare, rest_bytes=3 * HUGE)
        held[1000 + mark] = rest or filled(HUGE, 0)
        for key in (mark, 1000 + mark):
            held[key].view()[:] = key % 251
        if len(held) > 8:
            held.pop(min(held)).close()
        assert all((m.view() == key % 251).all() for key, m in held.items())


def test_a_move_that_fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = module._move, iter(range(100))
    monkeypatch.setattr(module, "_move", lambda *a: next(count) < 2 and real(*a))
    spare = [filled(2 * HUGE, mark) for mark in (1, 2, 3, 4)]
    mapping, rest = resident(6 * HUGE, spare, rest_bytes=2 * HUGE)
    assert rest is None
    mapping.view()[:] = 5
    assert (mapping.view() == 5).all()


def test_pieces_are_bounded() -> None:
    mapping = filled(HUGE, 0)
    for _ in range(100):
        mapping, _ = resident(mapping.nbytes + HUGE, [mapping, filled(HUGE, 0)])
        assert len(mapping._pieces) <= module._MOST_PIECES + 1


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, 3 * HUGE + PAGE_BYTES])
def test_without_memory_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    spare = [filled(2 * HUGE, 1)]
    before_bytes = resident_bytes()
    monkeypatch.setattr(module, "_populate", refuse)
    with pytest.raises(OSError, match="no memory"):
        resident(nbytes, spare)
    assert resident_bytes() <= before_bytes - 2 * HUGE + NOISE


def test_a_pool_that_was_shrunk_gives_memory_back() -> None:
    pool = Pool(10 * HUGE)
    slabs = [pool.take(6 * HUGE), pool.take(4 * HUGE)]
    pool.shrink(5 * HUGE)
    for slab in slabs:
        pool.give(slab)
    assert pool.held_bytes <= 5 * HUGE
    taken = [pool.take(HUGE), pool.take(2 * HUGE), pool.take(PAGE_BYTES)]
    assert pool.held_bytes <= 5 * HUGE
    assert [slab.nbytes for slab in taken] == [HUGE, 2 * HUGE, PAGE_BYTES]


def test_every_pinned_mapping_is_unpinned_once() -> None:
    pinned: dict[int, int] = {}
    pool = Pool(8 * HUGE, pin=pinned.__setitem__, unpin=lambda address, _: pinned.pop(address))
    for huge_pages in (3, 4, 1, 2, 5, 6, 1, 7):
        slab = pool.take(huge_pages * HUGE + PAGE_BYTES)
        assert sum(pinned.values()) == pool.held_bytes <= 8 * HUGE
        pool.give(slab)
    pool.trim()
    assert not pinned
