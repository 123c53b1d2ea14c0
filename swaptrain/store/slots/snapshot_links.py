"""Which slots the snapshots of a run hold, as the links in their directories say."""

from __future__ import annotations

import os
import re
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.store.paths import RunPaths

__all__ = ["held_slots", "snapshot_paths"]

_NAME = re.compile(r"\d{8,}")
_SEGMENT = re.compile(r"\d{3,}")
_SLOT = re.compile(r"[0-9a-f]+-\d+")


def snapshot_paths(run_dir: Path) -> list[Path]:
    """Return the directories of the snapshots that are whole, in the order of their steps."""
    found = [p for p in RunPaths(run_dir).snapshots.glob("*") if _NAME.fullmatch(p.name)]
    return sorted((p for p in found if p.is_dir()), key=lambda path: int(path.name))


def held_slots(snapshot: Path) -> dict[int, str]:
    """Return the names of the slots that a snapshot holds, by segment.

    Raises DamagedStoreError for a link that does not point to a slot.
    """
    held = {}
    for link in sorted(snapshot.iterdir()):
        if link.is_symlink() and _SEGMENT.fullmatch(link.name):
            slot = Path(os.readlink(link)).name
            if not _SLOT.fullmatch(slot):
                raise DamagedStoreError(
                    "a snapshot's name points to no slot", segment=int(link.name), path=link
                )
            held[int(link.name)] = slot
    return held
