"""Reads a store that exists and says where its run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from swaptrain.errors import DamagedStoreError
from swaptrain.execute.commits import Ledger
from swaptrain.execute.home import StoreHome
from swaptrain.execute.layouts import Layouts
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.recovery import Action, Decision, Found, decide
from swaptrain.store.record import read_record
from swaptrain.store.root import RootRecord
from swaptrain.store.slots import Slots

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
    records: dict[int, Mapping[str, Any]] = {}
    for k in layouts.state:
        slot = slots.live(k)
        records[k] = slot.read_record()
        if records[k]["segment"] != k:
            raise DamagedStoreError("a live name points to another segment's slot", segment=k)
        if records[k]["fingerprint"] != root.fingerprint:
            raise DamagedStoreError("a slot belongs to another model", segment=k, path=slot.path)
        home.slots[k] = slot
        for name, sums in records[k]["checksums"].items():
            home.unverified[slot.array(name).path, None] = sums
    gradients = _gradient_records(layouts, home, root) if deferred else {}
    versions = tuple(
        int(records[s.index]["version"]) if s.index in records else None
        for s in layouts.model.segments
    )
    newest = max(version for version in versions if version is not None)
    lowest = min(k for k, r in records.items() if r["version"] == newest)
    handoff = _handoff(records[lowest], layouts)
    found = Found(
        versions=versions,
        gradients=tuple(
            int(gradients[s.index]["version"]) if s.index in gradients else None
            for s in layouts.model.segments
        )
        if deferred and root.commit_every == 1
        else None,
        handoffs=frozenset({(lowest, newest)} if _verifies(handoff, home) else ()),
        commit_every=root.commit_every,
        root_step=root.step,
    )
    decision = decide(found)
    continued = decision.action is Action.CONTINUE
    source = gradients if decision.pending or (deferred and gradients) else records
    step = decision.step if continued else decision.done
    ledger = _ledger([r for r in source.values() if r["version"] == step])
    if continued:
        for key, sums in handoff.items():
            files, row = home.place(key)
            home.wrote(key)
            home.unverified[files.path, row] = sums
    for k in decision.pending:
        key = ObjectKey(Kind.ACCUMULATOR, "gradient", k)
        home.wrote(key)
        home.unverified[home.place(key)[0].path, None] = gradients[k]["checksums"]["gradient"]
    return Position(
        decision=decision,
        ledger=ledger if continued or decision.pending else Ledger(),
        finished=Ledger() if continued or not step else ledger,
        handoff=handoff if continued else {},
    )


def _gradient_records(
    layouts: Layouts, home: StoreHome, root: RootRecord
) -> dict[int, Mapping[str, Any]]:
    """Return the records of spilled gradients that verify; a torn one is as if it were absent."""
    records: dict[int, Mapping[str, Any]] = {}
    for k in layouts.accumulators:
        path: Path = home.accumulator_record(k)
        try:
            record = read_record(path)
        except DamagedStoreError:
            continue
        if record["fingerprint"] == root.fingerprint and record["segment"] == k:
            records[k] = record
    return records


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


def _ledger(records: list[Mapping[str, Any]]) -> Ledger:
    ledger = Ledger()
    for record in records:
        ledger.norms.update(record["norms"])
        ledger.losses.update(enumerate(record["losses"]))
    return ledger
