"""The region of a device's slabs: pinned once, its holes joined, its end given back."""

from __future__ import annotations

import pytest
import torch

from swaptrain.errors import RunError
from swaptrain.memory.pinned import PinnedPool
from swaptrain.memory.slab import PAGE_BYTES, PoolExhausted, Slab

PAGES = 10


class Pins:
    """What is pinned now, and how often something was."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.count = 0

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.now
        self.now[address] = nbytes
        self.count += 1

    def unpin(self, address: int, nbytes: int) -> None:
        assert self.now.pop(address) == nbytes


def pool_of(pins: Pins) -> PinnedPool:
    return PinnedPool(PAGES * PAGE_BYTES + 100, pins.pin, pins.unpin)


def taken(pool: PinnedPool, *pages: int) -> list[Slab]:
    """Return slabs of so many pages, each full of its index."""
    slabs = [pool.take(count * PAGE_BYTES) for count in pages]
    for index, slab in enumerate(slabs):
        slab.tensor(torch.uint8, slab.nbytes).fill_(index)
    return slabs


def start(slab: Slab) -> int:
    return slab.tensor(torch.uint8, 1).data_ptr()


def test_slabs_of_any_size_come_and_go_in_what_was_pinned_once() -> None:
    """All of it, in whole pages, with the first slab; it is unpinned when all are back."""
    pins = Pins()
    pool = pool_of(pins)
    assert not pins.now
    for pages in (3, 4, 1, 10, 2, 7):
        slab = pool.take(pages * PAGE_BYTES)
        assert list(pins.now.values()) == [PAGES * PAGE_BYTES] == [pool.held_bytes]
        pool.trim()  # not while a slab is in use
        pool.give(slab)
    assert pins.count == 1
    pool.trim()
    assert not pins.now
    assert not pool.held_bytes
    pool.give(pool.take(PAGES * PAGE_BYTES))
    assert pins.count == 2


def test_a_slab_takes_the_smallest_hole_and_holes_become_one() -> None:
    pool = pool_of(Pins())
    first, _second, third, _fourth = taken(pool, 4, 1, 2, 1)  # and two pages are free behind them
    places = start(first), start(third)
    pool.give(third)
    pool.give(first)
    (small,) = taken(pool, 2)
    assert start(small) == places[1]
    pool.give(small)
    assert not pool.has_room(5 * PAGE_BYTES)
    pool.give(_second)
    assert start(pool.take(7 * PAGE_BYTES)) == places[0]


def test_what_is_free_in_pieces_is_joined_and_keeps_its_content() -> None:
    """Not what somebody has a view of: it would change under its holder."""
    pool = pool_of(Pins())
    slabs = taken(pool, 2, 2, 2, 2, 2)
    view = slabs[3].tensor(torch.uint8, 2 * PAGE_BYTES)
    pool.give(slabs[0])
    pool.give(slabs[2])
    with pytest.raises(PoolExhausted, match=r"raise memory\.host by 12\.0 KiB"):
        pool.take(3 * PAGE_BYTES)
    pool.join()
    assert start(slabs[3]) == view.data_ptr()
    (large,) = taken(pool, 4)
    for index in (1, 3, 4):
        assert set(slabs[index].memory) == {index}
    assert set(view.tolist()) == {3}
    assert set(large.memory) == {0}


def test_a_budget_that_becomes_less_cuts_the_end_off_as_soon_as_it_is_free() -> None:
    pins = Pins()
    pool = pool_of(pins)
    before, last = taken(pool, 4, 6)
    pool.shrink(7 * PAGE_BYTES + 50)
    assert pool.held_bytes == PAGES * PAGE_BYTES
    with pytest.raises(PoolExhausted):
        pool.take(PAGE_BYTES)
    pool.give(last)
    assert list(pins.now.values()) == [7 * PAGE_BYTES] == [pool.held_bytes]
    (again,) = taken(pool, 3)
    assert not pool.has_room(PAGE_BYTES)
    assert set(before.memory) == {0}
    pool.give(again)
    pool.give(before)
    pool.trim()
    assert not pins.now


def test_memory_that_cannot_be_pinned_is_given_back() -> None:
    """The error is the device's own, and the next attempt is a new one."""
    refused = True
    pins = Pins()

    def pin(address: int, nbytes: int) -> None:
        if refused:
            raise RunError("CUDA cannot pin it")
        pins.pin(address, nbytes)

    pool = PinnedPool(PAGES * PAGE_BYTES, pin, pins.unpin)
    with pytest.raises(RunError, match="cannot pin"):
        pool.take(PAGE_BYTES)
    assert not pool.held_bytes
    refused = False
    pool.give(pool.take(PAGES * PAGE_BYTES))
    assert pins.count == 1
