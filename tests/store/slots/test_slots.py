"""Slots: what is free is derived, switches are durable links, creation can be repeated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.state_record import SlotRecord, state_record
from swaptrain.store.slots.slots import Slots
from tests.store.helpers import array, spec

LAYOUT = SegmentLayout((array("weights", [spec("w", (100,))]),))


def _slots(run_dir: Path, count: int = 3, paths: list[Path] | None = None) -> Slots:
    slots = Slots(run_dir, paths)
    slots.create(LAYOUT, count, record_bytes=4096)
    return slots


def test_a_switch_frees_the_slot_before(tmp_path: Path) -> None:
    """A taken slot is not free, a live one is not free, the one that was live is."""
    slots = _slots(tmp_path)
    kind = LAYOUT.shape_class
    first = slots.take(kind)
    assert first is not None
    assert len(slots.free(kind)) == 2
    slots.switch(1, first)
    assert slots.live(1) == first
    second = slots.take(kind)
    assert second is not None and second != first
    slots.switch(1, second)
    assert slots.live(1) == second
    assert first in slots.free(kind) and len(slots.free(kind)) == 2
    link = tmp_path / "store" / "segments" / "001"
    assert os.readlink(link) == f"../../slots/{second.id}"
    assert link.resolve() == second.path.resolve()


def test_a_class_runs_out(tmp_path: Path) -> None:
    """Nothing is reserved when every slot is live or taken; giving back helps."""
    slots = _slots(tmp_path, 1)
    slot = slots.take(LAYOUT.shape_class)
    assert slot is not None
    assert slots.take(LAYOUT.shape_class) is None
    slots.give(slot)
    assert slots.take(LAYOUT.shape_class) == slot


def test_opening_again_finds_the_same_state(tmp_path: Path) -> None:
    """A new process derives the same free slots, and a left-over link aside does no harm."""
    slots = _slots(tmp_path)
    slot = slots.take(LAYOUT.shape_class)
    assert slot is not None
    slots.switch(1, slot)
    (tmp_path / "store" / "segments" / "001.next").symlink_to("../../slots/torn")
    again = _slots(tmp_path)
    assert again.live(1) == slot
    assert again.free(LAYOUT.shape_class) == slots.free(LAYOUT.shape_class)
    other = again.take(LAYOUT.shape_class)
    assert other is not None
    again.switch(1, other)
    assert again.live(1) == other


def test_creation_completes_what_a_crash_left(tmp_path: Path) -> None:
    """Missing files are made again; what was committed stays."""
    slots = _slots(tmp_path)
    slot = slots.create(LAYOUT, 3, record_bytes=4096)[0]
    sums = {"weights": [0] * LAYOUT.arrays[0].chunks}
    record = state_record(segment=1, version=7, fingerprint="t", layout=LAYOUT, checksums=sums)
    slot.write_record(record)
    slot.array("weights").files()[0].unlink()
    again = _slots(tmp_path).create(LAYOUT, 3, record_bytes=4096)[0]
    assert again.read_record(1) == SlotRecord(**record, metadata=slot.metadata)
    assert again.array("weights").files()[0].stat().st_size == LAYOUT.arrays[0].chunk_bytes


def test_a_record_that_is_read_and_written_again_keeps_its_bytes(tmp_path: Path) -> None:
    """So that two slots of the same step have the same record, and one can restore the other."""
    slot = _slots(tmp_path).create(LAYOUT, 1, record_bytes=4096)[0]
    rows = [{"name": "x", "segment": 1, "micro_batch": 0, "row": 2, "checksums": [7]}]
    sums = {"weights": [3] * LAYOUT.arrays[0].chunks}
    slot.write_record(
        state_record(
            segment=1,
            version=7,
            fingerprint="t",
            layout=LAYOUT,
            checksums=sums,
            handoff={"gradients": rows},
            losses=[0.5, float("nan")],
            norms={"w": float("inf")},
        )
    )
    before = slot.record_path.read_bytes()
    slot.write_record(slot.read_record(1).attributes())
    assert slot.record_path.read_bytes() == before


def test_several_disks_take_turns(tmp_path: Path) -> None:
    """Slots lie on the disks in turn, and a disk that is gone is named."""
    disks = [tmp_path / "x", tmp_path / "y"]
    run = tmp_path / "run"
    slots = _slots(run, 4, disks)
    made = slots.create(LAYOUT, 4, record_bytes=4096)
    assert [slot.path.resolve().is_relative_to(disks[i % 2]) for i, slot in enumerate(made)] == [
        True
    ] * 4
    slots.switch(1, made[1])
    assert slots.live(1).array("weights").files()[0].exists()
    disks[1].rename(tmp_path / "gone")
    with pytest.raises(DamagedStoreError, match="is its disk there"):
        slots.live(1)
    with pytest.raises(RunError, match="bring its disk back"):
        _slots(run, 4, disks)


def test_a_run_in_the_place_of_one_that_was_moved_leaves_its_slots_alone(tmp_path: Path) -> None:
    """The folder on the other disk has the path in its name, and the owner in a file."""
    disk, run = tmp_path / "disk", tmp_path / "run"
    slots = _slots(run, 3, [disk])
    slots.create(LAYOUT, 3, record_bytes=4096)
    before = sorted(path for path in disk.rglob("*"))
    _slots(run, 3, [disk]).create(LAYOUT, 3, record_bytes=4096)
    assert sorted(path for path in disk.rglob("*")) == before
    run.rename(tmp_path / "moved")
    for _ in range(2):
        with pytest.raises(RunError, match=r"holds slots of another run.*delete the folder too"):
            _slots(run, 3, [disk])
        assert sorted(path for path in disk.rglob("*")) == before
    shutil.rmtree(next(path for path in disk.glob("swaptrain-slots/*") if path.is_dir()))
    _slots(run, 3, [disk])
    assert sorted(path for path in disk.rglob("*")) == before


def test_spares_are_deleted_on_request(tmp_path: Path) -> None:
    """A finished run keeps its live slots only, on every disk."""
    disks = [tmp_path / "x", tmp_path / "y"]
    slots = _slots(tmp_path / "run", 4, disks)
    slot = slots.take(LAYOUT.shape_class)
    assert slot is not None
    slots.switch(1, slot)
    slots.delete_free()
    assert [path.name for path in (tmp_path / "run" / "slots").iterdir()] == [slot.id]
    assert [path.name for path in tmp_path.glob("[xy]/*/*/*")] == [slot.id]
    assert slots.live(1).array("weights").files()[0].exists()


def test_two_trees_are_switched_as_a_whole(tmp_path: Path) -> None:
    """With the unit `step` each tree has slots of its own, and the store is one of the two."""
    slots = Slots(tmp_path, trees=True)
    made = slots.create(LAYOUT, 4, record_bytes=4096)
    for k, tree, slot in ((1, "a", 0), (2, "a", 1), (1, "b", 2), (2, "b", 3)):
        slots.switch(k, made[slot], tree=tree)
    assert slots.tree() is None
    assert slots.free(LAYOUT.shape_class) == []
    for tree, expected in (("a", 0), ("b", 2), ("a", 0)):
        slots.switch_tree()
        assert slots.tree() == tree
        assert slots.live(1) == made[expected]
        assert (tmp_path / "store" / "segments" / "001" / "weights" / "zarr.json").exists()


def test_a_missing_name_is_damage(tmp_path: Path) -> None:
    """A segment without a live name is reported with its number."""
    with pytest.raises(DamagedStoreError, match="segment 5"):
        _slots(tmp_path).live(5)
