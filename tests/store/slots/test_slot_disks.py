"""Which of several disks takes a slot: each step's writes are shared."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from swaptrain.store.slots.slot_disks import SlotDisks, SlotSpread

LAYER, LARGE = 10, 26
CLASSES = [("embedding", LARGE, 2), ("layer", LAYER, 18), ("head", LARGE, 2)]
"""Name, bytes and slots: of one segment, of sixteen, of one."""


def placed(spread: SlotSpread) -> dict[str, Path]:
    """Return the disk of each slot of a model, placed class by class."""
    return {
        f"{name}-{number:03d}": spread.next_disk(number, size)
        for name, size, count in CLASSES
        for number in range(count)
    }


@pytest.mark.parametrize("count", [2, 3])
def test_slots_that_are_written_in_one_step_are_spread(count: int) -> None:
    """The embedding and the head, each in its first slot and then in its second."""
    paths = [Path(f"/disk{number}") for number in range(count)]
    at = placed(SlotSpread(paths))
    for number in ("000", "001"):
        assert at[f"embedding-{number}"] != at[f"head-{number}"]
    assert at["embedding-000"] != at["embedding-001"]
    sizes = {name: size for name, size, _ in CLASSES}
    held: Counter[Path] = Counter()
    for slot, disk in at.items():
        held[disk] += sizes[slot.partition("-")[0]]
    assert max(held.values()) - min(held.values()) <= LARGE
    layers = Counter(disk for slot, disk in at.items() if slot.startswith("layer"))
    assert min(layers.values()) >= 3


def test_slots_lie_where_the_plan_has_them_and_more_go_beside_them(tmp_path: Path) -> None:
    """What exists keeps its place and counts; a class that comes later finds the same disks."""
    run, paths = tmp_path / "run", [tmp_path / "x", tmp_path / "y"]
    (run / "slots").mkdir(parents=True)
    planned = placed(SlotSpread(paths))
    for classes in (CLASSES[:2], CLASSES):  # the second time as when a run is opened again
        disks = SlotDisks(run, paths)
        for name, size, count in classes:
            for number in range(count):
                disks.place(run / "slots" / f"{name}-{number:03d}", size)
    found = {link.name: Path(os.readlink(link)).parents[2] for link in (run / "slots").iterdir()}
    assert found == planned
