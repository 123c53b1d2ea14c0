"""The region of a device's slabs: pinned once, its holes joined, its end given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swaptrain.errors import RunError
from swaptrain.memory.pinned import PinnedPool
from swaptrain.memory.slab import PAGE_BYTES, PoolExhausted, Slab
from swaptrain.observe.memory_usage import resident_bytes

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
    """Not where somebody has a view of what lies between: it would change under its holder."""
    pool = pool_of(Pins())
    slabs = taken(pool, 2, 2, 2, 2, 2)
    pool.give(slabs[0])
    pool.give(slabs[2])
    with pytest.raises(PoolExhausted, match=r"raise memory\.host by 12\.0 KiB"):
        pool.take(3 * PAGE_BYTES)
    view = slabs[1].tensor(torch.uint8, 2 * PAGE_BYTES)
    assert not pool.join(3 * PAGE_BYTES, PAGES * PAGE_BYTES)
    assert start(slabs[1]) == view.data_ptr()
    del view
    assert not pool.join(3 * PAGE_BYTES, 2 * PAGE_BYTES - 1)
    assert not pool.join(5 * PAGE_BYTES, PAGES * PAGE_BYTES)
    assert pool.join(3 * PAGE_BYTES, 2 * PAGE_BYTES)
    view = slabs[1].tensor(torch.uint8, 2 * PAGE_BYTES)
    pool.give(slabs[1])
    assert pool.live_bytes == 6 * PAGE_BYTES, "a view of it is alive where it is now"
    assert set(view.tolist()) == {1}
    (large,) = taken(pool, 4)
    for index in (3, 4):
        assert set(slabs[index].memory) == {index}
    assert set(large.memory) == {0}
    assert set(view.tolist()) == {1}


def test_the_fewest_bytes_are_moved() -> None:
    pool = pool_of(Pins())
    slabs = taken(pool, 1, 3, 1, 1, 1, 1, 2)
    for index in (0, 2, 4, 6):
        pool.give(slabs[index])  # holes of 1, 1, 1 and 2 pages, with 3, 1 and 1 between them
    places = [start(slabs[index]) for index in (1, 3, 5)]
    assert pool.join(3 * PAGE_BYTES, PAGES * PAGE_BYTES)
    moved = [start(slabs[index]) - place for index, place in zip((1, 3, 5), places, strict=True)]
    assert moved == [0, 0, -PAGE_BYTES]


def test_a_budget_that_becomes_less_moves_what_lies_behind_it_and_cuts_the_end_off() -> None:
    pins = Pins()
    pool = pool_of(pins)
    first, second, third = taken(pool, 4, 3, 3)
    pool.give(first)
    pool.shrink(8 * PAGE_BYTES + 50)
    assert list(pins.now.values()) == [8 * PAGE_BYTES] == [pool.held_bytes]
    with pytest.raises(PoolExhausted):
        pool.take(3 * PAGE_BYTES)
    (again,) = taken(pool, 2)
    assert [set(slab.memory) for slab in (second, third, again)] == [{1}, {2}, {0}]
    for slab in (second, third, again):
        pool.give(slab)
    pool.trim()
    assert not pins.now


def test_what_is_viewed_or_needed_is_not_cut_off() -> None:
    """The rest goes when it can: until then nothing new is put behind the budget."""
    pins = Pins()
    pool = pool_of(pins)
    before, last = taken(pool, 2, 8)
    view = last.tensor(torch.uint8, 1)
    pool.give(before)
    pool.shrink(5 * PAGE_BYTES)
    assert pool.held_bytes == PAGES * PAGE_BYTES
    pool.give(last)
    assert not pool.has_room(PAGE_BYTES)
    del view
    (again,) = taken(pool, 5)
    pool.give(again)
    assert list(pins.now.values()) == [5 * PAGE_BYTES] == [pool.held_bytes]


def test_the_pages_of_the_end_go_back_to_the_system() -> None:
    pool = PinnedPool(64 << 20, *[lambda *_: None] * 2)
    slab = pool.take(4 << 20)
    before_bytes = resident_bytes()
    pool.shrink(16 << 20)
    assert before_bytes - resident_bytes() == pytest.approx(48 << 20, rel=0.1)
    assert not pool.has_room(13 << 20)
    pool.give(slab)


def test_a_forked_process_has_no_pinned_memory() -> None:
    """A device writes there: pages that were copied on a write would be others."""
    pool = pool_of(Pins())
    address = start(pool.take(PAGE_BYTES))
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if rest and all(digit in "0123456789abcdef" for digit in first):
            inside = int(first, 16) <= address < int(rest.split()[0], 16)
        elif line.startswith("VmFlags") and inside:
            flags = line
    assert "dc" in flags.split()  # not copied by a fork


def test_a_region_that_is_still_viewed_is_unpinned_and_counts_until_it_goes() -> None:
    """After an error its traceback may hold tensors: the device has to let go of the memory."""
    pins = Pins()
    pool = pool_of(pins)
    slab, other = taken(pool, 6, 2)
    view = slab.tensor(torch.uint8, 6 * PAGE_BYTES)
    pool.give(slab)
    pool.trim()
    assert pins.now, "one slab is not back"
    pool.give(other)
    pool.trim()
    assert not pins.now
    assert set(view.tolist()) == {0}
    assert pool.live_bytes == 6 * PAGE_BYTES
    (new,) = taken(pool, 4)
    del view
    assert pool.live_bytes == 4 * PAGE_BYTES
    assert set(new.memory) == {0}
    pool.give(new)
    pool.give(pool.take(PAGES * PAGE_BYTES))


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
    slab = pool.take(PAGE_BYTES)
    assert pins.count == 1
    refused = True
    with pytest.raises(RunError, match="cannot pin"):
        pool.shrink(4 * PAGE_BYTES)
    pool.give(slab)
    pool.trim()  # and is not unpinned twice
    assert not pins.now
