"""The decision tables of the commit protocol, row by row, and every pattern besides."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import swaptrain.store.disk.durable_files
from swaptrain.errors import DamagedStoreError
from swaptrain.store.slots.recovery_rules import (
    Action,
    Decision,
    Found,
    decide,
    flush_everything,
)

SEGMENTS = 3
FUSED_ROWS = [
    ("no root", Found(None), Decision(Action.CREATE)),
    ("nothing trained", Found((0, 0, 0)), Decision(Action.BEGIN, 1)),
    ("step done", Found((4, 4, 4)), Decision(Action.BEGIN, 5)),
    (
        "step done, its hand-off still there",
        Found((4, 4, 4), handoffs=frozenset({(2, 4)})),
        Decision(Action.BEGIN, 5),
    ),
    (
        "killed after the last segment's commit",
        Found((4, 4, 5), handoffs=frozenset({(3, 5)})),
        Decision(Action.CONTINUE, 5, segment=2),
    ),
    (
        "killed after all but the first",
        Found((4, 5, 5), handoffs=frozenset({(2, 5), (3, 5)})),
        Decision(Action.CONTINUE, 5, segment=1),
    ),
    (
        "a segment without state in between",
        Found((4, None, 5), handoffs=frozenset({(3, 5)})),
        Decision(Action.CONTINUE, 5, segment=2),
    ),
    ("segments without state", Found((None, 4, None)), Decision(Action.BEGIN, 5)),
]
DEFERRED_ROWS = [
    ("no root", Found(None, ()), Decision(Action.CREATE)),
    ("nothing trained", Found((0, 0, 0), (None, None, None)), Decision(Action.BEGIN, 1)),
    ("update pending", Found((3, 3, 3), (4, 4, 4)), Decision(Action.BEGIN, 5, pending=(1, 2, 3))),
    (
        "killed in the updates",
        Found((4, 3, 3), (4, 4, 4)),
        Decision(Action.BEGIN, 5, pending=(2, 3)),
    ),
    ("one update left", Found((4, 4, 3), (4, 4, 4)), Decision(Action.BEGIN, 5, pending=(3,))),
    ("all updates done", Found((4, 4, 4), (4, 4, 4)), Decision(Action.BEGIN, 5)),
    (
        "killed in the backward, hand-off kept",
        Found((4, 4, 4), (4, 5, 5), frozenset({(2, 5)})),
        Decision(Action.CONTINUE, 5, segment=1),
    ),
    (
        "killed in the backward, no hand-off",
        Found((4, 4, 4), (4, None, 5)),
        Decision(Action.BEGIN, 5),
    ),
    (
        "killed while the first gradient was written",
        Found((4, 4, 4), (4, 4, None)),
        Decision(Action.BEGIN, 5),
    ),
    (
        "first step's backward",
        Found((0, 0, 0), (None, 1, 1), frozenset({(2, 1)})),
        Decision(Action.CONTINUE, 1, segment=1),
    ),
]
TREE_ROWS = [
    ("fused", Found((6, 6, 6), is_whole=True, root_step=6), Decision(Action.BEGIN, 7)),
    (
        "deferred",
        Found((5, 5, 5), (6, 6, 6), is_whole=True, root_step=6),
        Decision(Action.BEGIN, 7, pending=(1, 2, 3)),
    ),
    (
        "deferred, flushed",
        Found((6, 6, 6), (6, 6, 6), is_whole=True, root_step=6),
        Decision(Action.BEGIN, 7),
    ),
    (
        "deferred, nothing trained",
        Found((0, 0, 0), (None, None, None), is_whole=True),
        Decision(Action.BEGIN, 1),
    ),
]


@pytest.mark.parametrize(
    ("found", "decision"),
    [pytest.param(f, d, id=name) for name, f, d in FUSED_ROWS + DEFERRED_ROWS + TREE_ROWS],
)
def test_row(found: Found, decision: Decision) -> None:
    """Each row of the tables leads to what the protocol says."""
    assert decide(found) == decision
    assert decision.done == max(0, decision.step - 1)


def test_a_missing_handoff_is_named() -> None:
    """A step that cannot go on names the segment whose hand-off is missing."""
    with pytest.raises(DamagedStoreError, match="hand-off of segment 3"):
        decide(Found((4, 4, 5), handoffs=frozenset({(3, 4), (2, 5)})))


@pytest.mark.parametrize("versions", list(product((3, 4, 5), repeat=SEGMENTS)))
def test_fused_patterns(versions: tuple[int, ...]) -> None:
    """A pattern is accepted only if commits from the last segment down lead to it."""
    reachable = {
        (*[s - 1] * (SEGMENTS - done), *[s] * done) for s in (4, 5) for done in range(SEGMENTS + 1)
    }
    handoffs = frozenset((k, s) for k in range(1, SEGMENTS + 1) for s in range(7))
    if versions in reachable:
        assert decide(Found(versions, handoffs=handoffs)).step in {max(versions), versions[0] + 1}
    else:
        with pytest.raises(DamagedStoreError, match=", ".join(map(str, versions))):
            decide(Found(versions, handoffs=handoffs))


def test_deferred_patterns() -> None:
    """Of all patterns of versions and gradients, exactly the reachable ones are accepted."""
    reachable: dict[tuple[tuple[int, ...], tuple[int | None, ...]], int] = {}
    for s in (1, 2):
        old: int | None = s - 1 if s > 1 else None
        for updated in range(SEGMENTS + 1):  # the forward of step s updates from s - 2 to s - 1
            if s > 1:
                versions = (*[s - 1] * updated, *[s - 2] * (SEGMENTS - updated))
                reachable[versions, (s - 1,) * SEGMENTS] = s
        # The backward of step s writes gradients, torn or not; done again, over those of itself.
        for lowest in (old, None):
            for torn in product({s, old, None}, repeat=SEGMENTS - 1):
                reachable[(s - 1,) * SEGMENTS, (lowest, *torn)] = s
        reachable[(s - 1,) * SEGMENTS, (s,) * SEGMENTS] = s + 1
    for versions in product((0, 1, 2), repeat=SEGMENTS):
        for gradients in product((None, 1, 2), repeat=SEGMENTS):
            if max(versions) == 2:
                continue  # the same patterns one step later, which are not enumerated whole
            if (versions, gradients) in reachable:
                assert decide(Found(versions, gradients)).step == reachable[versions, gradients]
            else:
                with pytest.raises(DamagedStoreError):
                    decide(Found(versions, gradients))


@pytest.mark.parametrize(
    "found",
    [
        Found((6, 6, 5), is_whole=True, root_step=6),
        Found((5, 5, 5), is_whole=True, root_step=6),
        Found((5, 5, 5), (6, 6, 5), is_whole=True, root_step=6),
        Found((None, None)),
    ],
)
def test_mixed_trees_are_damage(found: Found) -> None:
    """A live tree that is not uniform, or not what its root says, is refused."""
    with pytest.raises(DamagedStoreError):
        decide(found)


def test_a_hole_in_the_gradients_is_not_continued_below() -> None:
    """A gradient that a repeated step left torn has its own hand-off done again."""
    handoffs = frozenset({(2, 5), (3, 5)})
    assert decide(Found((4, 4, 4), (4, 5, None), handoffs)) == Decision(Action.BEGIN, 5)
    assert decide(Found((4,) * 4, (4, 5, 4, 5), frozenset({(2, 5), (4, 5)}))) == Decision(
        Action.CONTINUE, 5, segment=3
    )


def test_recovery_reads_what_the_disk_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that a failed flush left in the cache are dropped before anything is read."""
    dropped: list[Path] = []
    monkeypatch.setattr(swaptrain.store.slots.recovery_rules, "drop_cached", dropped.append)
    for name in ("metrics.jsonl", "slots/x/zarr.json", "spill/finished/001/record.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    flush_everything(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in dropped] == [
        "metrics.jsonl",
        "slots/x/zarr.json",
        "spill/finished/001/record.json",
    ]


def test_every_disk_is_flushed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flush covers the whole run; a slot whose disk is gone is left to those who need it."""
    flushed: list[Path] = []
    monkeypatch.setattr(swaptrain.store.disk.durable_files, "flush_file_system", flushed.append)
    (tmp_path / "slots" / "x").mkdir(parents=True)
    (tmp_path / "slots" / "y").symlink_to(tmp_path / "gone")
    (tmp_path / "slots" / "z").symlink_to("/dev/shm")
    flush_everything(tmp_path)
    assert flushed == [tmp_path, Path("/dev/shm")]
    monkeypatch.undo()
    flush_everything(tmp_path)
