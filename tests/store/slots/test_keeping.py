"""Which steps a run keeps as snapshots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swaptrain.store.slots.keeping import Keeping


def kept_of(keeping: Keeping, losses: dict[int, float], steps: int) -> list[int]:
    """Return what is kept behind so many steps, as a run makes and drops them."""
    kept: list[int] = []
    for step in range(1, steps + 1):
        known = {n: loss for n, loss in losses.items() if n <= step}
        if keeping.is_due(step, kept, known):
            kept.append(step)
            surplus = keeping.surplus(kept, known)
            assert step not in surplus
            kept = [n for n in kept if n not in surplus]
    return kept


def test_the_newest_and_the_best_are_kept() -> None:
    """Beside each other; one that is as low as an earlier one is not lower."""
    losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 4.0}
    assert kept_of(Keeping(every=3, last=2), losses, 10) == [6, 9]
    assert kept_of(Keeping(every=None, last=2, best=1), losses, 10) == [4]
    assert kept_of(Keeping(every=None, last=2, best=2), losses, 10) == [4, 8]
    assert kept_of(Keeping(every=3, last=1, best=2), losses, 10) == [4, 8, 9]
    assert kept_of(Keeping(every=5, last=1, best=3), losses, 10) == [4, 6, 8, 10]


def test_older_snapshots_of_another_rule_count_as_regular() -> None:
    """As before `best` was there; without `every` they are not wanted."""
    assert Keeping(every=10, last=2, best=1).surplus([3, 7, 10, 12], {10: 1.0, 12: 0.5}) == {3}
    assert Keeping(every=None, last=2, best=1).surplus([3, 7, 12], {7: 1.0, 12: 2.0}) == {3, 12}


@given(
    every=st.none() | st.integers(1, 5),
    last=st.integers(1, 3),
    best=st.integers(1, 4),
    losses=st.dictionaries(st.integers(1, 30), st.floats(0, 10)),
)
def test_no_more_are_kept_than_have_room(
    every: int | None, last: int, best: int, losses: dict[int, float]
) -> None:
    """And of all evaluated steps the best ones are there."""
    keeping = Keeping(every=every, last=last, best=best)
    kept = kept_of(keeping, losses, 30)
    assert len(kept) <= keeping.count
    lowest = sorted((loss, step) for step, loss in losses.items())[:best]
    assert {step for _, step in lowest} <= {*kept}
