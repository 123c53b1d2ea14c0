"""Reads a store that exists and says where its run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from swaptrain.durable.disk_backing import StoreHome
from swaptrain.durable.ledger import Ledger
from swaptrain.errors import DamagedStoreError, Where
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.root import RootRecord
from swaptrain.store.format.state_record import read_kept
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.recovery_rules import Action, Decision, Found, decide, last_commit
from swaptrain.store.slots.slot import Slot, frozen_slot
from swaptrain.store.slots.slots import Slots

__all__ = ["Position", "find_position"]


@dataclass
class Position:
    """Where a run goes on, with what the records say of the step."""

    decision: Decision
    ledger: Ledger
    """Of the step that is continued, or of the one whose updates are pending."""
    finished: Ledger
    """Of the last step that is done: its line of metrics may be missing."""
    handoff: dict[ObjectKey, list[int]] = field(default_factory=dict)
    """Checksums of the gradients that the step goes on from."""


def find_position(
    layouts: Layouts,
    slots: Slots,
    home: StoreHome,
    root: RootRecord,
    *,
    deferred: bool,
) -> Position:
    """Read every live record, decide by the protocol's tables, and point `home` to the versions.

    Raises DamagedStoreError when a record does not verify or the versions are a mixture.
    """
    records = {k: _live_record(k, layouts, slots, home, root) for k in layouts.state}
    for k, layout in layouts.frozen.items():
        _checked_record(k, layout, layouts, frozen_slot(slots.run_dir, k), home, root)
    torn: dict[int, DamagedStoreError] = {}
    settled = None
    if deferred and root.commit_every == 1:
        settled = _kept_records(layouts, home, root, torn)
    try:
        decision, handoff = _decide(records, settled, layouts, home, root, torn)
    except DamagedStoreError as error:
        # What a file that does not verify keeps from being understood, is said by its name.
        if torn:
            raise next(iter(torn.values())) from error
        raise
    source: Mapping[int, Mapping[str, Any]] = settled or {}
    if decision.action is Action.CONTINUE:
        for key, sums in handoff.items():
            home.wrote(key)
            files, row = home.place(key)
            home.unverified[files.place(row)] = sums
        above = {k: record for k, record in source.items() if k > decision.segment}
        for k, record in above.items():
            _adopt(k, record, home)
        ledger = _ledger(records if settled is None else above, decision.step)
        return Position(decision, ledger, Ledger(), handoff)
    for k in decision.pending:
        _adopt(k, source[k], home)
    # The gradients' records have a step before the segments' own; a finished run has only these.
    of_step = source and all(r["version"] == decision.done for r in source.values())
    ledger = _ledger(source if of_step else records, decision.done)
    return Position(decision, ledger if decision.pending else Ledger(), ledger)


def _decide(
    records: Mapping[int, Mapping[str, Any]],
    settled: Mapping[int, Mapping[str, Any]] | None,
    layouts: Layouts,
    home: StoreHome,
    root: RootRecord,
    torn: dict[int, DamagedStoreError],
) -> tuple[Decision, dict[ObjectKey, list[int]]]:
    """Decide by what was found, and return the hand-off of the step that was being committed.

    `records` are those of the live slots, `settled` those of finished gradients, which are what is
    committed in deferred mode. What is wrong with the hand-off goes into `torn`.
    """
    versions = {k: int(record["version"]) for k, record in records.items()}
    commits, gradients = records, None
    if settled is not None:
        commits = settled
        gradients = {k: int(record["version"]) for k, record in settled.items()}
    last = last_commit(versions, gradients) if root.commit_every == 1 else None
    indices = [segment.index for segment in layouts.model.segments]
    found = Found(
        versions=tuple(versions.get(k) for k in indices),
        gradients=None if gradients is None else tuple(gradients.get(k) for k in indices),
        handoffs=frozenset(() if last is None else {last}),
        commit_every=root.commit_every,
        root_step=root.step,
    )
    # As if the hand-off were whole: of versions that are a mixture none can be what is wrong.
    decision = decide(found)
    if last is None or decision.action is not Action.CONTINUE:
        return decision, {}
    handoff = _handoff(commits[last[0]], layouts, home)
    damage = _damage(last[0], handoff, home)
    torn.update(damage)
    return (decide(replace(found, handoffs=frozenset())) if damage else decision), handoff


def _live_record(
    k: int, layouts: Layouts, slots: Slots, home: StoreHome, root: RootRecord
) -> Mapping[str, Any]:
    """Return the record of a segment's live slot, to which `home` is pointed."""
    home.slots[k] = slots.live(k)
    link = RunPaths(slots.run_dir).live_link(k)
    return _checked_record(k, layouts.state[k], layouts, home.slots[k], home, root, link)


def _checked_record(
    k: int,
    layout: SegmentLayout,
    layouts: Layouts,
    slot: Slot,
    home: StoreHome,
    root: RootRecord,
    link: Path | None = None,
) -> Mapping[str, Any]:
    """Return a slot's record, after a look at what it says of the slot's arrays."""
    try:
        record = slot.read_record(k, link=link)
    except DamagedStoreError as error:
        raise error.within(Where(segment=k)) from error
    _check_record(record, slot, layout, k, root)
    slot.check_files(record)
    for name, sums in record["checksums"].items():
        for key in layouts.state_keys(k, name):
            files, row = home.place(key)
            home.unverified[files.place(row)] = sums[files.first : files.first + files.chunks]
    return record


def _check_record(
    record: Mapping[str, Any], slot: Slot, layout: SegmentLayout, k: int, root: RootRecord
) -> None:
    """Raise DamagedStoreError unless a record is the model's, and laid out as the model is.

    The sizes of buffers and of reads come from the layout, so the disk must have the same.
    """
    if record["fingerprint"] != root.fingerprint:
        text = "a slot belongs to another model"
        raise DamagedStoreError(text, segment=k, path=slot.record_path)
    if record["table"] != layout.table() or record["checksums"].keys() != {
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


def _kept_records(
    layouts: Layouts, home: StoreHome, root: RootRecord, torn: dict[int, DamagedStoreError]
) -> dict[int, Mapping[str, Any]]:
    """Return the records of finished gradients that verify; a torn one is as if it were absent.

    What is wrong with those goes into `torn`.
    """
    records: dict[int, Mapping[str, Any]] = {}
    for k in layouts.state:
        try:
            record = read_kept(home.kept_record(k), k)
        except DamagedStoreError as error:
            torn[k] = error.within(Where(segment=k))
            continue
        if record["fingerprint"] != root.fingerprint:
            continue
        arrays = home.kept_arrays(k)
        if {name: len(sums) for name, sums in record["checksums"].items()} != arrays:
            raise DamagedStoreError(
                "what is kept of a segment has other arrays than the segment",
                segment=k,
                path=home.kept_record(k),
            )
        records[k] = record
    return records


def _adopt(k: int, record: Mapping[str, Any], home: StoreHome) -> None:
    """Let a segment's gradient, and its buffers, be those that were kept."""
    for name, sums in record["checksums"].items():
        gradient = name == "gradient"
        key = ObjectKey(Kind.ACCUMULATOR if gradient else Kind.STATE, name, k)
        home.kept(key)
        files, row = home.place(key)
        home.unverified[files.place(row)] = sums


def _handoff(
    record: Mapping[str, Any], layouts: Layouts, home: StoreHome
) -> dict[ObjectKey, list[int]]:
    rows = record["handoff"].get("gradients", [])
    handoff = {}
    for row in rows:
        key = ObjectKey(Kind.GRADIENT, row["name"], row["segment"], row["micro_batch"])
        if (
            key.name not in layouts.gradients
            or not home.has_gradient(key)
            or len(row["checksums"]) != layouts.gradients[key.name].chunks
            or key in handoff
        ):
            raise DamagedStoreError(f"a hand-off names {key}, which the model does not have")
        handoff[key] = list(row["checksums"])
    return handoff


def _damage(
    segment: int, handoff: Mapping[ObjectKey, list[int]], home: StoreHome
) -> dict[int, DamagedStoreError]:
    """Return what is wrong with the hand-off of a segment, if a gradient of it does not verify."""
    for key, sums in handoff.items():
        files, row = home.saved_place(key)
        for chunk, (path, expected) in enumerate(zip(files.files(row), sums, strict=True)):
            try:
                content = np.fromfile(path, np.uint8)
            except FileNotFoundError:
                content = np.empty(0, np.uint8)
            if xxhash.xxh3_64_intdigest(content.data) != expected:
                what = "a gradient of the hand-off, without which its step cannot go on, is damaged"
                error = DamagedStoreError(
                    what, segment=segment, array=key.name, chunk=chunk, path=path
                )
                return {segment: error}
    return {}


def _ledger(records: Mapping[int, Mapping[str, Any]], step: int) -> Ledger:
    """Return what the records of one step say of it."""
    ledger = Ledger()
    for record in records.values():
        if record["version"] == step:
            ledger.norms.update(record["norms"])
            ledger.losses.update(enumerate(record["losses"]))
    return ledger
