"""Reads a store that exists and says where its run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from swaptrain.errors import DamagedStoreError
from swaptrain.execute.commits import Ledger
from swaptrain.execute.home import StoreHome
from swaptrain.execute.layouts import Layouts
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.record import read_record
from swaptrain.store.recovery import Action, Decision, Found, decide
from swaptrain.store.root import RootRecord
from swaptrain.store.slots import Slots, frozen_slot

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
    from_micro_batch: int = 0
    """The first micro-batch of the wave that is continued: the sums of those before were kept."""


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
    records = {k: _live_record(k, slots, home, root) for k in layouts.state}
    for k in layouts.frozen:
        for name, sums in frozen_slot(slots.run_dir, k).read_record()["checksums"].items():
            files, _ = home.place(ObjectKey(Kind.STATE, name, k))
            home.unverified[files.path, None] = sums
    journal = deferred and root.commit_every == 1
    kept = _kept_records(layouts, home, root) if journal else {}
    newest = max((int(record["version"]) for record in records.values()), default=0)
    lowest = min((k for k, r in records.items() if r["version"] == newest), default=0)
    interrupted = not journal and any(r["version"] != newest for r in records.values())
    handoff = _handoff(records[lowest], layouts) if interrupted else {}
    indices = [segment.index for segment in layouts.model.segments]
    found = Found(
        versions=tuple(int(records[k]["version"]) if k in records else None for k in indices),
        gradients=tuple(int(kept[k]["version"]) if k in kept else None for k in indices)
        if journal
        else None,
        handoffs=frozenset({(lowest, newest)} if _verifies(handoff, home) else ()),
        commit_every=root.commit_every,
        root_step=root.step,
    )
    decision = decide(found)
    if decision.action is Action.CONTINUE:
        for key, sums in handoff.items():
            files, row = home.place(key)
            home.wrote(key)
            home.unverified[files.path, row] = sums
        first = min((key.micro_batch for key in handoff), default=0)
        if first:
            _adopt_sums(layouts, home, root, decision, first)
        ledger = _ledger(records, decision.step)
        return Position(decision, ledger, Ledger(), handoff, first)
    for k in decision.pending:
        _adopt(k, kept[k], home)
    # The gradients' records have a step before the segments' own; a finished run has only these.
    source = kept if kept and all(r["version"] == decision.done for r in kept.values()) else records
    ledger = _ledger(source, decision.done)
    return Position(decision, ledger if decision.pending else Ledger(), ledger)


def _live_record(k: int, slots: Slots, home: StoreHome, root: RootRecord) -> Mapping[str, Any]:
    """Return the record of a segment's live slot, to which `home` is pointed."""
    slot = slots.live(k)
    record = slot.read_record()
    if record["segment"] != k:
        raise DamagedStoreError("a live name points to another segment's slot", segment=k)
    if record["fingerprint"] != root.fingerprint:
        raise DamagedStoreError("a slot belongs to another model", segment=k, path=slot.path)
    home.slots[k] = slot
    for name, sums in record["checksums"].items():
        home.unverified[slot.array(name).path, None] = sums
    return record


def _kept_records(
    layouts: Layouts, home: StoreHome, root: RootRecord
) -> dict[int, Mapping[str, Any]]:
    """Return the records of what is kept that verify; a torn one is as if it were absent."""
    records: dict[int, Mapping[str, Any]] = {}
    for k in layouts.state:
        try:
            record = read_record(home.kept_record(k))
        except DamagedStoreError:
            continue
        if record["fingerprint"] == root.fingerprint and record["segment"] == k:
            records[k] = record
    return records


def _adopt_sums(
    layouts: Layouts, home: StoreHome, root: RootRecord, decision: Decision, micro_batches: int
) -> None:
    """Take over what the waves before the last one have summed: `micro_batches` of the step."""
    records = _kept_records(layouts, home, root)
    for k in layouts.state:
        if k > decision.segment:
            continue
        record = records.get(k, {"version": -1})
        if record["version"] != decision.step or record["micro_batches"] != micro_batches:
            raise DamagedStoreError(
                f"step {decision.step} was interrupted in its last wave and cannot go on: the sums "
                f"of its first {micro_batches} micro-batches are missing; start over with --fresh",
                segment=k,
                path=home.kept_record(k),
            )
        _adopt(k, record, home)


def _adopt(k: int, record: Mapping[str, Any], home: StoreHome) -> None:
    """Let a segment's gradient, and its buffers, be those that were kept."""
    for name, sums in record["checksums"].items():
        gradient = name == "gradient"
        key = ObjectKey(Kind.ACCUMULATOR if gradient else Kind.STATE, name, k)
        home.kept(key)
        home.unverified[home.place(key)[0].path, None] = sums


def _handoff(record: Mapping[str, Any], layouts: Layouts) -> dict[ObjectKey, list[int]]:
    rows = record["handoff"].get("gradients", [])
    handoff = {}
    for row in rows:
        key = ObjectKey(Kind.GRADIENT, row["name"], row["segment"], row["micro_batch"])
        if key.name not in layouts.gradients:
            raise DamagedStoreError(f"a hand-off names {key}, which the model does not have")
        handoff[key] = list(row["checksums"])
    return handoff


def _verifies(handoff: Mapping[ObjectKey, list[int]], home: StoreHome) -> bool:
    """Whether every gradient of a hand-off is on the disk as its record says."""
    for key, sums in handoff.items():
        files, row = home.gradient_place(key)
        for path, expected in zip(files.files(row), sums, strict=True):
            try:
                content = np.fromfile(path, np.uint8)
            except FileNotFoundError:
                return False
            if xxhash.xxh3_64_intdigest(content.data) != expected:
                return False
    return True


def _ledger(records: Mapping[int, Mapping[str, Any]], step: int) -> Ledger:
    """Return what the records of one step say of it."""
    ledger = Ledger()
    for record in records.values():
        if record["version"] == step:
            ledger.norms.update(record["norms"])
            ledger.losses.update(enumerate(record["losses"]))
    return ledger
