"""How room is made: what the plan spares goes first, and as much as a hole needs."""

from __future__ import annotations

from swaptrain.memory.pinned import PinnedPool
from swaptrain.memory.slab import PAGE_BYTES
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Kind, ObjectKey
from tests.support.late_backing import LateBacking, one, waits_complete

KEYS = [ObjectKey(Kind.STATE, f"part{i}", 1) for i in range(6)]
LARGE = ObjectKey(Kind.STATE, "large", 1)


def test_where_free_bytes_lie_in_pieces_more_is_evicted_until_one_hole_is_enough() -> None:
    """What is used last goes first, which leaves two pages free that do not lie together."""
    backing = LateBacking()
    backing.contents = {key: bytes([i]) * PAGE_BYTES for i, key in enumerate(KEYS)}
    backing.contents[LARGE] = b"L" * (2 * PAGE_BYTES)
    # In place of the sizes of PAGES, which does not have these objects.
    backing.size_bytes = lambda key: len(backing.contents[key])  # type: ignore[method-assign]
    pool = PinnedPool(6 * PAGE_BYTES, lambda *_: None, lambda *_: None)
    tier = Tier(pool, backing, backing.wait)
    with waits_complete(backing):
        for key in KEYS:  # one page behind the other
            slabs = tier.acquire(one(reads=(key,)), 0)
            if key == KEYS[1]:
                view = slabs[key].memory
            del slabs
            tier.release(one(reads=(key,)))
        spare = [(9, KEYS[0]), (8, KEYS[2]), (7, KEYS[3]), (6, KEYS[4])]
        # Pages 0 and 2 would be enough, but nobody may move page 1 away from between them.
        assert tier._entries.make_room_at_once(2 * PAGE_BYTES, 5, spare)
        assert tier.resident() == [KEYS[1], KEYS[4], KEYS[5]]
        assert spare == [(6, KEYS[4])], "no more went than had to"
        large = tier.acquire(one(reads=(LARGE,)), 0)[LARGE]
        assert bytes(large.memory) == backing.contents[LARGE]
        assert bytes(view) == backing.contents[KEYS[1]]


def test_slabs_that_a_device_holds_are_let_go_before_the_pool_refuses() -> None:
    """Its copies under way keep the room of what was dropped."""
    backing = LateBacking()
    backing.contents = {key: bytes([i]) * PAGE_BYTES for i, key in enumerate(KEYS)}
    # In place of the sizes of PAGES, which does not have these objects.
    backing.size_bytes = lambda key: PAGE_BYTES  # type: ignore[method-assign]
    held = []

    def let_go() -> bool:
        held_any = bool(held)
        held.clear()
        return held_any

    pool = PinnedPool(2 * PAGE_BYTES, lambda *_: None, lambda *_: None)
    tier = Tier(pool, backing, backing.wait, let_go=let_go)
    with waits_complete(backing):
        for key in KEYS[:2]:
            held.append(tier.acquire(one(reads=(key,)), 0)[key].memory)
            tier.release(one(reads=(key,)))
            tier.free(key)
        assert not pool.has_room(PAGE_BYTES)
        slab = tier.acquire(one(reads=(KEYS[2],)), 0)[KEYS[2]]
        assert bytes(slab.memory) == backing.contents[KEYS[2]]
