"""How room is made: what the plan spares goes first, and as much as a hole needs."""

from __future__ import annotations

from swaptrain.memory.pinned import PinnedPool
from swaptrain.memory.slab import PAGE_BYTES
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Kind, ObjectKey
from tests.support.late_home import LateHome, one, waits_complete

KEYS = [ObjectKey(Kind.STATE, f"part{i}", 1) for i in range(6)]
LARGE = ObjectKey(Kind.STATE, "large", 1)


def test_where_free_bytes_lie_in_pieces_more_is_evicted_until_one_hole_is_enough() -> None:
    """What is used last goes first, which leaves two pages free that do not lie together."""
    home = LateHome()
    home.contents = {key: bytes([i]) * PAGE_BYTES for i, key in enumerate(KEYS)}
    home.contents[LARGE] = b"L" * (2 * PAGE_BYTES)
    # In place of the sizes of PAGES, which does not have these objects.
    home.size_bytes = lambda key: len(home.contents[key])  # type: ignore[method-assign]
    pool = PinnedPool(6 * PAGE_BYTES, lambda *_: None, lambda *_: None)
    tier = Tier(pool, home, home.wait)
    with waits_complete(home):
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
        assert bytes(large.memory) == home.contents[LARGE]
        assert bytes(view) == home.contents[KEYS[1]]
