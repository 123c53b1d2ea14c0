"""The segments of a store as their live names and records say, checked against the root."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.program.roles import Role, role_of
from swaptrain.store.format.root import RootRecord
from swaptrain.store.format.state_record import SlotRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.slot import Slot, frozen_slot
from swaptrain.units import how_many

__all__ = ["StoredSegment", "check_segment", "stored_segment", "stored_segments"]


@dataclass(frozen=True)
class StoredSegment:
    """What the disk has of one segment."""

    segment: int
    state: Slot | None
    """The live slot, under its own name: a switch does not change what it is."""
    frozen: Slot | None
    link: Path | None = None
    """The live name that led to `state`."""
    record: SlotRecord | None = None
    """Of `state`, once it was read."""
    frozen_record: SlotRecord | None = None

    @property
    def version(self) -> int | None:
        """The step after which the state is as it is; None where nothing is ever updated."""
        return None if self.record is None else self.record.version

    def read(self) -> StoredSegment:
        """Return the same with its records.

        Raises DamagedStoreError where one is not whole or is another segment's.
        """
        k, state, frozen = self.segment, self.state, self.frozen
        return replace(
            self,
            record=state.read_record(k, link=self.link) if state is not None else None,
            frozen_record=frozen.read_record(k) if frozen is not None else None,
        )


def stored_segments(run_dir: Path, root: RootRecord) -> list[StoredSegment]:
    """Return every segment's live slot and frozen parameters with their records, in order.

    Raises DamagedStoreError when a record does not verify, is of another segment or model, or when
    any parameter of the root's table is missing.
    """
    stored = []
    for row in root.segments:
        found = stored_segment(run_dir, row.segment).read()
        check_segment(found, root)
        stored.append(found)
    return stored


def stored_segment(run_dir: Path, segment: int, *, tree: str | None = None) -> StoredSegment:
    """Return the places of a segment in a tree, or in the live one, unread."""
    paths = RunPaths(run_dir)
    link = paths.live_link(segment, tree)
    frozen = frozen_slot(run_dir, segment)
    return StoredSegment(
        segment,
        Slot(paths.slot(link.readlink().name)) if link.is_symlink() else None,
        frozen if frozen.path.is_dir() else None,
        link,
    )


def check_segment(stored: StoredSegment, root: RootRecord) -> None:
    """Raise DamagedStoreError unless the records are the model's and have all its parameters."""
    k = stored.segment
    names: set[str] = set()
    for slot, record in ((stored.state, stored.record), (stored.frozen, stored.frozen_record)):
        if slot is None or record is None:
            continue
        if record.fingerprint != root.fingerprint:
            raise DamagedStoreError("a slot belongs to another model", segment=k, path=slot.path)
        names.update(
            row.name for row in record.table if role_of(row.array) in (Role.WEIGHTS, Role.FROZEN)
        )
    missing = [name for name in root.segments[k - 1].parameters if name not in names]
    if missing:
        raise DamagedStoreError(
            f"a segment lacks {how_many(len(missing), 'parameter')}, {missing[0]} first",
            segment=k,
            path=stored.link if stored.state is None else stored.state.path,
        )
