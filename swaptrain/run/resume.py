"""Reads a store that exists and says where its run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from swaptrain.compute.loss_scale import LossScale
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.durable.ledger import Ledger
from swaptrain.errors import DamagedStoreError, Where
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.root import RootRecord
from swaptrain.store.format.state_record import SegmentRecord, SlotRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.run_position import Handoff, read_position
from swaptrain.store.slots.recovery_rules import Decision
from swaptrain.store.slots.slot import Slot, frozen_slot
from swaptrain.store.slots.slots import Slots

__all__ = ["ResumePoint", "find_resume_point"]


@dataclass
class ResumePoint:
    """Where a run goes on, with what the records say of the step."""

    decision: Decision
    ledger: Ledger
    """Of the step that is continued, or of the one whose updates are pending."""
    finished: Ledger
    """Of the last step that is done: its line of metrics may be missing."""
    handoff: dict[ObjectKey, list[int]] = field(default_factory=dict)
    """Checksums of the gradients that the step goes on from."""


def find_resume_point(
    layouts: Layouts,
    slots: Slots,
    backing: DiskBacking,
    root: RootRecord,
) -> ResumePoint:
    """Read every live record, decide by the protocol's tables, and point `backing` to the versions.

    Raises DamagedStoreError when a record does not verify or the versions are a mixture.
    """
    records = {k: _live_record(k, layouts, slots, backing, root) for k in layouts.state}
    for k, layout in layouts.frozen.items():
        _checked_record(k, layout, layouts, frozen_slot(slots.run_dir, k), backing, root)
    run = read_position(RunPaths(slots.run_dir), root, records)
    handoff = _handoff(run.handoff, layouts, backing)
    damage = _damage(run.handoff, handoff, backing)
    if damage is not None:
        run = run.without_handoff(damage)
    decision = run.decided()
    for k in run.gradients_used:
        _adopt(k, run.gradients[k], backing)
    if run.handoff is not None:
        for key, sums in handoff.items():
            backing.found_spilled(key, sums)
        finished = {k: run.gradients[k] for k in run.gradients_used}
        ledger = _ledger(records if run.found.gradients is None else finished, decision.step)
        return ResumePoint(decision, ledger, Ledger(), handoff)
    # The gradients' records have a step before the segments' own; a finished run has only these.
    of_step = run.gradients and all(r.version == run.done for r in run.gradients.values())
    ledger = _ledger(run.gradients if of_step else records, run.done)
    return ResumePoint(decision, ledger if decision.pending else Ledger(), ledger)


def _live_record(
    k: int, layouts: Layouts, slots: Slots, backing: DiskBacking, root: RootRecord
) -> SlotRecord:
    """Return the record of a segment's live slot, to which `backing` is pointed."""
    slot = slots.live(k)
    backing.point(k, slot)
    link = RunPaths(slots.run_dir).live_link(k)
    return _checked_record(k, layouts.state[k], layouts, slot, backing, root, link)


def _checked_record(
    k: int,
    layout: SegmentLayout,
    layouts: Layouts,
    slot: Slot,
    backing: DiskBacking,
    root: RootRecord,
    link: Path | None = None,
) -> SlotRecord:
    """Return a slot's record, after a look at what it says of the slot's arrays."""
    try:
        record = slot.read_record(k, link=link)
    except DamagedStoreError as error:
        raise error.within(Where(segment=k)) from error
    _check_record(record, slot, layout, k, root)
    slot.check_files(record)
    for name, sums in record.checksums.items():
        for key in layouts.state_keys(k, name):
            backing.found_live(key, sums)
    return record


def _check_record(
    record: SlotRecord, slot: Slot, layout: SegmentLayout, k: int, root: RootRecord
) -> None:
    """Raise DamagedStoreError unless a record is the model's, and laid out as the model is.

    The sizes of buffers and of reads come from the layout, so the disk must have the same.
    """
    if record.fingerprint != root.fingerprint:
        text = "a slot belongs to another model"
        raise DamagedStoreError(text, segment=k, path=slot.record_path)
    if [row.attributes() for row in record.table] != layout.table() or record.checksums.keys() != {
        array.name for array in layout.arrays
    }:
        raise DamagedStoreError(
            "a record has other tensors than its segment", segment=k, path=slot.record_path
        )
    for array in layout.arrays:
        found = slot.array(array.name)
        if (found.dtype, found.chunk_bytes, found.chunks) != (
            array.dtype,
            array.chunk_bytes,
            array.chunks,
        ):
            raise DamagedStoreError(
                "an array is not laid out as its segment",
                segment=k,
                array=array.name,
                path=found.path,
            )


def _adopt(k: int, record: SegmentRecord, backing: DiskBacking) -> None:
    """Let a segment's gradient, and its buffers, be those that the record is of.

    Raises DamagedStoreError where the record has other arrays than the segment.
    """
    arrays = {name: len(sums) for name, sums in record.checksums.items()}
    if arrays != backing.places.finished_arrays(k):
        raise DamagedStoreError(
            "a finished gradient has other arrays than its segment",
            segment=k,
            path=backing.files.record(k),
        )
    for name, sums in record.checksums.items():
        gradient = name == "gradient"
        key = ObjectKey(Kind.ACCUMULATOR if gradient else Kind.STATE, name, k)
        backing.found_finished(key, sums)


def _handoff(
    found: Handoff | None, layouts: Layouts, backing: DiskBacking
) -> dict[ObjectKey, list[int]]:
    handoff: dict[ObjectKey, list[int]] = {}
    for row in found.rows if found is not None else ():
        key = row.key
        if (
            key.label not in layouts.gradients
            or not backing.places.has_gradient(key)
            or len(row.checksums) != layouts.gradients[key.label].chunks
            or key in handoff
        ):
            raise DamagedStoreError(f"a hand-off names {key}, which the model does not have")
        handoff[key] = list(row.checksums)
    return handoff


def _damage(
    found: Handoff | None, handoff: Mapping[ObjectKey, list[int]], backing: DiskBacking
) -> DamagedStoreError | None:
    """Return what is wrong with the hand-off, if a gradient of it does not verify."""
    for key, sums in handoff.items():
        files, row = backing.saved_place(key)
        for chunk, (path, expected) in enumerate(zip(files.files(row), sums, strict=True)):
            try:
                content = np.fromfile(path, np.uint8)
            except FileNotFoundError:
                content = np.empty(0, np.uint8)
            if xxhash.xxh3_64_intdigest(content.data) != expected:
                what = "a gradient of the hand-off, without which its step cannot go on, is damaged"
                segment = found.segment if found is not None else None
                return DamagedStoreError(
                    what, segment=segment, array=key.label, chunk=chunk, path=path
                )
    return None


def _ledger(records: Mapping[int, SegmentRecord], step: int) -> Ledger:
    """Return what the records of one step say of it."""
    ledger = Ledger()
    for record in records.values():
        if record.version == step:
            ledger.norms.update(record.norms)
            ledger.losses.update(enumerate(record.losses))
            if record.scale:
                scale, good, skipped = record.scale
                ledger.scale = LossScale(scale, int(good), int(skipped))
    return ledger
