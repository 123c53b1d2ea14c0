"""The segments of a store as their live names and records say, checked against the root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.store.root import RootRecord, segments_directory
from swaptrain.store.slots import Slot, frozen_slot

__all__ = ["Held", "check_held", "held_segments"]


@dataclass(frozen=True)
class Held:
    """What the disk holds of one segment."""

    segment: int
    state: Slot | None
    """The live slot, under its own name: a switch does not change what it is."""
    record: dict[str, Any] | None
    """Of `state`."""
    frozen: Slot | None
    frozen_record: dict[str, Any] | None

    @property
    def version(self) -> int | None:
        """The step after which the state is as it is; None where nothing is ever updated."""
        return None if self.record is None else int(self.record["version"])


def held_segments(run_dir: Path, root: RootRecord) -> list[Held]:
    """Return every segment's live slot and frozen parameters with their records, in order.

    Raises DamagedStoreError when a record does not verify, is of another segment or model, or when
    any parameter of the root's table is missing.
    """
    held = []
    for row in root.segments:
        k = row["segment"]
        state, frozen = _live_slot(run_dir, k), frozen_slot(run_dir, k)
        found = Held(
            k,
            state,
            state.read_record() if state is not None else None,
            frozen if frozen.path.is_dir() else None,
            frozen.read_record() if frozen.path.is_dir() else None,
        )
        check_held(found, root)
        held.append(found)
    return held


def check_held(held: Held, root: RootRecord) -> None:
    """Raise DamagedStoreError unless the records are the segment's and have all its parameters."""
    k = held.segment
    names: set[str] = set()
    for slot, record in ((held.state, held.record), (held.frozen, held.frozen_record)):
        if slot is None or record is None:
            continue
        if record["segment"] != k:
            raise DamagedStoreError("a live name points to another segment's slot", segment=k)
        if record["fingerprint"] != root.fingerprint:
            raise DamagedStoreError("a slot belongs to another model", segment=k, path=slot.path)
        names.update(
            row["name"] for row in record["table"] if row["array"].startswith(("weights", "frozen"))
        )
    missing = [name for name in root.segments[k - 1]["parameters"] if name not in names]
    if missing:
        raise DamagedStoreError(
            f"{len(missing)} parameters of a segment are missing, {missing[0]} first", segment=k
        )


def _live_slot(run_dir: Path, segment: int) -> Slot | None:
    link = segments_directory(run_dir) / f"{segment:03d}"
    return Slot(run_dir / "slots" / link.readlink().name) if link.is_symlink() else None
