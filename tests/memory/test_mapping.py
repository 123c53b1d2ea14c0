"""Mappings: pages that move keep their content, and never take more memory than they should."""

from __future__ import annotations

import numpy as np
import pytest

import swaptrain.memory.mapping as module
from swaptrain.memory.mapping import PAGE_BYTES, Mapping, resident
from swaptrain.observe.memory_usage import resident_bytes

HUGE = 2 * 2**20


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
        6 * HUGE + PAGE_BYTES, [filled(3 * HUGE + 8192, 1), filled(4 * HUGE, 2)]
    )
    assert rest is not None
    assert rest.nbytes == HUGE
    assert joined.address % HUGE == 0
    assert (joined.view()[: 3 * HUGE] == 1).all()
    assert (joined.view()[3 * HUGE : 6 * HUGE] == 2).all()
    # What came from two mappings is moved on in two pieces.
    again, rest = resident(4 * HUGE, [joined])
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
    small, rest = resident(20 * HUGE, spare)
    assert resident_bytes() <= before_bytes
    large, none = resident(50 * HUGE, [small] if rest is None else [small, rest])
    assert none is None or none.nbytes == 14 * HUGE
    assert resident_bytes() <= before_bytes
    large.view()[:] = 7
    assert resident_bytes() <= before_bytes


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, HUGE - PAGE_BYTES, HUGE, 5 * HUGE + 3 * PAGE_BYTES])
def test_a_kernel_that_does_not_move_pages_gives_new_ones(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(module, "_mremap", lambda: None)
    mapping, rest = resident(nbytes, [filled(4 * HUGE, 9), filled(PAGE_BYTES, 9)])
    assert rest is None
    assert not mapping.view().any()
    assert mapping.view().size == nbytes


def test_a_slab_without_huge_pages_leaves_the_rest_of_a_large_one() -> None:
    mapping, rest = resident(PAGE_BYTES, [filled(4 * HUGE, 9)])
    assert mapping.nbytes == PAGE_BYTES
    assert rest is None or rest.nbytes == 3 * HUGE


def test_many_sizes_in_turn_keep_their_own_content() -> None:
    random = np.random.default_rng(0)
    held = {mark: filled(int(random.integers(1, 9)) * HUGE, mark) for mark in range(8)}
    for mark in range(8, 200):
        spare = [held.pop(int(random.choice(list(held)))) for _ in range(2)]
        pages = int(random.integers(1, sum(m.nbytes for m in spare) // PAGE_BYTES))
        held[mark], rest = resident(pages * PAGE_BYTES, spare)
        held[1000 + mark] = rest or filled(HUGE, 0)
        for key in (mark, 1000 + mark):
            held[key].view()[:] = key % 251
        if len(held) > 8:
            held.pop(min(held)).close()
        assert all((m.view() == key % 251).all() for key, m in held.items())
