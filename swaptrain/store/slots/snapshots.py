"""Snapshots: whole earlier steps, each of which holds the slots that were live after its step.

A snapshot is made without moving a byte: `RUN/snapshots/STEP/NNN` are links to the slots that are
live when the step is done, and a slot that a snapshot holds is not free. The commits of the next
step go to other slots, so that the live state and the snapshot part by themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from swaptrain.errors import DamagedStoreError
from swaptrain.store.disk.durable_files import (
    flush_directory,
    make_directory,
    run_error,
    write_aside,
)
from swaptrain.store.format.root import RootRecord
from swaptrain.store.format.schema import AtLeastOne, Name, Record, ShownText, Whole
from swaptrain.store.paths import ASIDE, ZARR_JSON, RunPaths, link_text, segment_name
from swaptrain.store.slots.keeping import Keeping
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshot_links import held_slots, snapshot_paths

__all__ = ["Snapshot", "Snapshots", "clear_unfinished", "drop_snapshots", "drop_surplus"]
__all__ += ["list_snapshots"]


class SnapshotRecord(Record):
    """Content of `RUN/snapshots/STEP/zarr.json`."""

    title: ClassVar[str] = "a snapshot's record"
    step: Whole
    fingerprint: Name
    commit_every: AtLeastOne
    slots: dict[ShownText, ShownText]
    """Names of the slots by segment, which the links repeat."""


@dataclass(frozen=True)
class Snapshot:
    """A step that is kept; its directory is a zarr group of the segments, like the live one."""

    path: Path

    @property
    def step(self) -> int:
        """The step after which the state is as it is."""
        return int(self.path.name)

    @cached_property
    def slots(self) -> dict[int, Slot]:
        """The slots by segment; raises DamagedStoreError for a link that points to none."""
        paths = RunPaths(self.path.parents[1])
        return {k: Slot(paths.slot(name)) for k, name in held_slots(self.path).items()}

    @cached_property
    def record(self) -> SnapshotRecord:
        """Record of the snapshot.

        Raises DamagedStoreError when it does not verify or the links say something else.
        """
        path = self.path / ZARR_JSON
        record = SnapshotRecord.read(path)
        links = {segment_name(k): slot.id for k, slot in self.slots.items()}
        if record.step != self.step or record.slots != links:
            raise DamagedStoreError("a snapshot's record does not fit its links", path=path)
        return record


def list_snapshots(run_dir: Path) -> list[Snapshot]:
    """Return the snapshots of a run in the order of their steps; nothing of them is verified."""
    return [Snapshot(path) for path in snapshot_paths(run_dir.absolute())]


class Snapshots:
    """Makes the snapshots of a run that is open for writing, and drops those not wanted any more.

    `losses` are held-out losses by step, of all evaluations so far.
    """

    def __init__(
        self,
        slots: Slots,
        segments: Sequence[int],
        *,
        keeping: Keeping,
        root: RootRecord,
    ) -> None:
        self._slots, self._segments = slots, tuple(segments)
        self._keeping, self._root = keeping, root

    def due(self, step: int, losses: Mapping[int, float]) -> bool:
        """Whether a snapshot of `step`, the last one done, is wanted that is not there."""
        kept = [snapshot.step for snapshot in list_snapshots(self._slots.run_dir)]
        return self._keeping.is_due(step, kept, losses)

    def make(self, step: int, losses: Mapping[int, float]) -> None:
        """Hold the live slots, whose state is that of `step`, durably; then drop another.

        To be called before the next commit. The new one is durable before another is dropped,
        and that is durably gone before its slots are free. Raises RunError.
        """
        run_dir = self._slots.run_dir
        tree = self._slots.tree()
        slots = {k: self._slots.live(k, tree=tree) for k in self._segments}
        for k, slot in slots.items():
            if slot.read_record(k).version != step:
                raise DamagedStoreError(
                    f"a snapshot of step {step} cannot be made: the live state is of another step",
                    segment=k,
                    path=slot.record_path,
                )
        paths = RunPaths(run_dir)
        make_directory(paths.snapshots)
        path = paths.snapshot(step)
        aside = path.with_name(path.name + ASIDE)
        record = SnapshotRecord(
            step=step,
            fingerprint=self._root.fingerprint,
            commit_every=self._root.commit_every,
            slots={segment_name(k): slot.id for k, slot in slots.items()},
        )
        try:
            _remove(aside)
            aside.mkdir()
            for k, slot in slots.items():
                link = aside / segment_name(k)
                link.symlink_to(link_text(link, paths.slot(slot.id)))
            write_aside(aside / ZARR_JSON, record.encoded())  # flushes the links as well
            aside.replace(path)
        except OSError as error:
            raise run_error(error, path, "make the snapshot") from error
        self._slots.hold(path.name, [slot.id for slot in slots.values()])
        flush_directory(paths.snapshots)
        drop_surplus(self._slots, self._keeping, losses)


def drop_surplus(slots: Slots, keeping: Keeping, losses: Mapping[int, float]) -> None:
    """Give up the snapshots that are not to be kept. Raises RunError."""
    found = list_snapshots(slots.run_dir)
    surplus = keeping.surplus([snapshot.step for snapshot in found], losses)
    drop_snapshots(slots, [snapshot for snapshot in found if snapshot.step in surplus])


def drop_snapshots(slots: Slots, snapshots: Sequence[Snapshot]) -> None:
    """Give up snapshots; only when that is durable are their slots free. Raises RunError."""
    for snapshot in snapshots:
        aside = snapshot.path.with_name(snapshot.path.name + ASIDE)
        try:
            _remove(aside)
            snapshot.path.replace(aside)
        except OSError as error:
            raise run_error(error, snapshot.path, "drop the snapshot") from error
        flush_directory(snapshot.path.parent)
        slots.release(snapshot.path.name)
        _remove(aside)


def clear_unfinished(run_dir: Path) -> None:
    """Remove what a kill left of a snapshot that was being made or dropped."""
    for path in RunPaths(run_dir).snapshots.glob(f"*{ASIDE}"):
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a directory of links and a record; no link is followed."""
    if path.exists():
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise run_error(error, path, "delete") from error
