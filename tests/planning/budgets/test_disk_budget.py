"""Processes of a run that share a disk need room on it together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swaptrain.errors import ConfigError
from swaptrain.planning.budgets.disk_budget import DiskUse, check_disk, scratch_bytes

MIB = 2**20


def use(rank: int, **other: object) -> DiskUse:
    """Return what a rank takes of a disk with 100 MiB free: 60 MiB of it, where nothing is yet."""
    found = DiskUse(
        rank=rank,
        kernel="one machine",
        device=1,
        paths=[f"/runs/rank-{rank:03d}"],
        has_run_dir=True,
        is_own_disk=False,
        needed_bytes=60 * MIB,
        snapshots_bytes=0,
        reserved_bytes=0,
        is_resumed=False,
        is_there=False,
        free_bytes=100 * MIB,
    )
    return replace(found, **other)  # type: ignore[arg-type]  # of any field


def check(*uses: DiskUse) -> list[str]:
    """Return the notes of a check."""
    notes: list[str] = []
    check_disk(uses, notes.append)
    return notes


def test_ranks_of_one_disk_are_summed() -> None:
    """The message has all directories, the sum, and what is free."""
    assert check(use(0)) == []
    with pytest.raises(ConfigError) as caught:
        check(use(0), use(1))
    assert str(caught.value) == (
        "/runs/rank-000, /runs/rank-001: the run needs 120.0 MiB of disk there for ranks 0, 1, "
        "100.0 MiB are free: make room, or set run.dir to another disk"
    )


def test_a_rank_on_a_disk_of_its_own_names_the_key_that_moves_it() -> None:
    """Another run.dir would move the link alone."""
    with pytest.raises(ConfigError, match=r"make room, or set distributed\.dirs to another disk"):
        check(use(1, is_own_disk=True, needed_bytes=200 * MIB))


@pytest.mark.parametrize("other", [{"device": 2}, {"kernel": "another machine"}])
def test_ranks_of_other_disks_are_not(other: dict[str, object]) -> None:
    """Two machines may give their disks the same number."""
    assert check(use(0), use(1, **other)) == []


def test_what_is_there_already_is_not_needed_again() -> None:
    """Neither of a rank that has all, on whatever disks, nor what another one has less."""
    has_all = use(1, is_there=True, is_resumed=True)
    assert check(use(0), has_all) == []
    more = use(1, reserved_bytes=90 * MIB, is_resumed=True)
    assert check(use(0), more) == []
    with pytest.raises(ConfigError, match=r"90.0 MiB of it are the run's already"):
        check(use(0, needed_bytes=110 * MIB), more)


def test_a_disk_that_does_not_say_what_is_free_is_noted() -> None:
    """Once, with all that is needed there."""
    (note,) = check(use(0, free_bytes=None), use(1, free_bytes=None))
    assert "the run needs 120.0 MiB of disk there for ranks 0, 1, and the file system" in note
    assert scratch_bytes([use(0, free_bytes=None)]) == 0


def test_scratch_is_divided_among_the_ranks_of_a_disk() -> None:
    """Half of what all of them leave free, in equal parts; of another disk nothing is taken."""
    alone = use(0, needed_bytes=20 * MIB)
    assert scratch_bytes([alone]) == 40 * MIB
    both = [alone, use(1, needed_bytes=20 * MIB)]
    assert [scratch_bytes(both, rank=rank) for rank in range(2)] == [15 * MIB] * 2
    apart = [alone, use(1, needed_bytes=20 * MIB, device=2)]
    assert [scratch_bytes(apart, rank=rank) for rank in range(2)] == [40 * MIB] * 2
