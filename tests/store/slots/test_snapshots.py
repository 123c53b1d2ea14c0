"""Snapshots hold slots: what they keep, when a slot is free again, what a kill leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.slots import snapshots as snapshots_module
from swaptrain.store.slots.keeping import Keeping
from swaptrain.store.slots.slot_bytes import copy_slot, verify_slot
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import (
    Snapshots,
    clear_unfinished,
    drop_snapshots,
    list_snapshots,
)
from tests.store.helpers import SmallStore, array, small_root, spec

LAYOUT = SegmentLayout((array("weights", [spec("w", (3000,))]),))
CLASS = LAYOUT.shape_class


class Kept:
    """Two segments of one class, with the slots of two snapshots and one free slot."""

    def __init__(self, run_dir: Path) -> None:
        self.store = SmallStore(run_dir, [LAYOUT, LAYOUT], free_slots=5)
        self.slots = self.store.slots
        root = small_root(2)
        self.snapshots = Snapshots(self.slots, [1, 2], keeping=Keeping(every=1, last=2), root=root)

    def step(self, version: int) -> None:
        for k in (2, 1):
            value = np.full(3000, version * 10 + k, np.float32)
            self.store.commit(k, version, {"weights": {"w": value}})

    def verify(self, run_dir: Path) -> list[int]:
        """Verify every snapshot, chunk by chunk; return their steps."""
        found = list_snapshots(run_dir)
        for snapshot in found:
            assert snapshot.record.step == snapshot.step
            for k, slot in snapshot.slots.items():
                verify_slot(slot, self.store.io, segment=k, version=snapshot.step)
        return [snapshot.step for snapshot in found]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.store.close()


def test_a_snapshot_keeps_what_later_commits_replace(kept: Kept, tmp_path: Path) -> None:
    """With one free slot for all, ten steps are kept in turn, at each moment two of them."""
    for version in range(1, 11):
        kept.step(version)
        assert kept.snapshots.due(version, {})
        kept.snapshots.make(version, {})
        assert not kept.snapshots.due(version, {})
        assert kept.verify(tmp_path) == list(range(max(1, version - 1), version + 1))
        for k in (1, 2):
            verify_slot(kept.slots.live(k), kept.store.io, segment=k, version=version)
    assert len(list((tmp_path / "slots").iterdir())) == 7
    again = Slots(tmp_path)
    again.create(LAYOUT, 7, record_bytes=kept.store.record_bytes)
    assert {slot.id for slot in again.free(CLASS)} == {slot.id for slot in kept.slots.free(CLASS)}


def test_a_dropped_slot_is_free_only_when_that_is_flushed(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the flush leaves the slots of the dropped snapshot held."""
    kept.step(1)
    kept.snapshots.make(1, {})
    kept.step(2)
    free = kept.slots.free(CLASS)
    before: list[int] = []

    def flush(path: Path) -> None:
        before.append(len(kept.slots.free(CLASS)))
        raise RunError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots_module, "flush_directory", flush)
        with pytest.raises(RunError):
            drop_snapshots(kept.slots, list_snapshots(tmp_path))
    assert before == [len(free)]
    assert kept.slots.free(CLASS) == free
    clear_unfinished(tmp_path)
    assert len(Slots(tmp_path)._held) == 0  # the next process sees that it is gone, after a flush


def test_what_a_kill_left_is_no_snapshot(kept: Kept, tmp_path: Path) -> None:
    """A directory aside is not listed, holds nothing, and does not hinder the next one."""
    kept.step(1)
    kept.snapshots.make(1, {})
    path = list_snapshots(tmp_path)[0].path
    path.rename(path.with_name(path.name + ".tmp"))
    assert list_snapshots(tmp_path) == []
    kept.snapshots.make(1, {})
    assert kept.verify(tmp_path) == [1]
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_links_that_were_changed_by_hand_are_found(kept: Kept, tmp_path: Path) -> None:
    """A link to another slot does not fit the record, one that leads elsewhere holds nothing."""
    kept.step(1)
    kept.snapshots.make(1, {})
    link = list_snapshots(tmp_path)[0].path / "001"
    link.unlink()
    link.symlink_to(f"../../slots/{kept.slots.free(CLASS)[0].id}")
    with pytest.raises(DamagedStoreError, match="does not fit its links"):
        _ = list_snapshots(tmp_path)[0].record
    link.unlink()
    link.symlink_to("/etc")
    with pytest.raises(DamagedStoreError, match="points to no slot"):
        _ = list_snapshots(tmp_path)[0].slots


def test_a_copy_is_verified_and_holds_the_same(kept: Kept) -> None:
    """All chunks and the record are copied; a flipped bit stops it and names the chunk."""
    kept.step(3)
    source, target = kept.slots.live(1), kept.slots.take(CLASS)
    assert target is not None
    copy_slot(source, target, kept.store.io, segment=1, version=3)
    verify_slot(target, kept.store.io, segment=1, version=3)
    assert [f.read_bytes() for f in source.array("weights").files()] == [
        f.read_bytes() for f in target.array("weights").files()
    ]
    with pytest.raises(DamagedStoreError, match="should hold step 2"):
        verify_slot(target, kept.store.io, segment=1, version=2)
    file = source.array("weights").files()[1]
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(DamagedStoreError, match="segment 1, array weights, chunk 1"):
        copy_slot(source, target, kept.store.io, segment=1, version=3)


def test_slots_beyond_what_is_wanted_are_deleted_unless_in_use(kept: Kept, tmp_path: Path) -> None:
    """Live and held ones stay whatever their number; free ones go."""
    kept.step(1)
    kept.snapshots.make(1, {})
    kept.step(2)
    slots = Slots(tmp_path)
    made = slots.create(LAYOUT, 5, record_bytes=kept.store.record_bytes)
    assert len(made) == 5 == len(list((tmp_path / "slots").iterdir()))
    assert len(slots.free(CLASS)) == 1
    assert len(slots.create(LAYOUT, 1, record_bytes=kept.store.record_bytes)) == 4
    assert kept.verify(tmp_path) == [1]
    for k in (1, 2):
        verify_slot(slots.live(k), kept.store.io, segment=k, version=2)
