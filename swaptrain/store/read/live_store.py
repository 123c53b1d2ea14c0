"""What is live in a store as a reader sees it, while a trainer may switch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.format.root import RootRecord, read_root
from swaptrain.store.format.state_record import SlotRecord
from swaptrain.store.paths import TREES, RunPaths
from swaptrain.store.read.stored_segments import StoredSegment, check_segment, stored_segment

__all__ = ["LiveStore", "look"]

_TRIES = 8
"""A slot would have to be switched away and back as often, between two lines, to be misjudged."""


@dataclass(frozen=True)
class LiveStore:
    """The root and every segment, with the slots that were live when they were looked at.

    A slot is only written again after it has left its live name: what verifies against its record
    is what was committed, and what does not, where the store `has_changed`, is no damage but a
    reason to look again. The slots' paths have the switched names resolved, so that everything that
    is read through one of them belongs to one slot.
    """

    run_dir: Path
    tree: str | None
    """The live tree of a store with the unit `step`."""
    root: RootRecord
    segments: tuple[StoredSegment, ...]

    @property
    def versions(self) -> dict[int, int]:
        """The steps after which segments are as they are; those that have state, in order."""
        return {one.segment: one.version for one in self.segments if one.version is not None}

    @property
    def records(self) -> dict[int, SlotRecord]:
        """The records of the live slots by segment: of those that have state."""
        return {one.segment: one.record for one in self.segments if one.record is not None}

    def has_changed(self) -> bool:
        """Whether any of it is not live any more: what was read of it may be torn."""
        return any(self._has_changed(one) for one in self.segments)

    def _has_changed(self, segment: StoredSegment) -> bool:
        try:
            return _segment(self.run_dir, self.tree, self.root, segment.segment) != segment
        except DamagedStoreError:
            return False  # damaged since


def look(run_dir: Path) -> LiveStore | None:
    """Return what is live; None where the creation of the store was never finished.

    Every record verifies. With a trainer at work they are of different moments, unless the result
    has not changed afterwards. Raises DamagedStoreError.
    """
    while True:
        tree = _live_tree(run_dir)
        root = read_root(run_dir, tree=tree)
        if root is None:
            return None
        found = [_segment(run_dir, tree, root, row.segment) for row in root.segments]
        if _live_tree(run_dir) == tree:
            return LiveStore(run_dir, tree, root, tuple(one for one in found if one is not None))


def _segment(
    run_dir: Path, tree: str | None, root: RootRecord, segment: int
) -> StoredSegment | None:
    """Return what the disk holds of a segment; None where the tree is not the live one."""
    for number in range(_TRIES):
        before = stored_segment(run_dir, segment, tree=tree)
        if _live_tree(run_dir) != tree:
            return None
        try:
            found = before.read()
            check_segment(found, root)
        except DamagedStoreError:
            # It may have left the live name meanwhile and be being written again, or even have
            # come back after it was another segment's.
            if stored_segment(run_dir, segment, tree=tree) == before and number + 1 == _TRIES:
                raise
            continue
        if stored_segment(run_dir, segment, tree=tree) == before:
            return found
    raise RunError(f"segment {segment} of {run_dir} is switched all the time: it cannot be read")


def _live_tree(run_dir: Path) -> str | None:
    paths = RunPaths(run_dir)
    tree = paths.live_tree()
    if tree not in (None, *TREES):
        raise DamagedStoreError("the store is a link to no tree of the run", path=paths.store)
    return tree
