"""Where a store says its run goes on, and which files beside the slots it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.check.claims import Unit, spilled_unit
from swaptrain.store.format.root import RootRecord
from swaptrain.store.format.state_record import read_kept
from swaptrain.store.paths import ZARR_JSON, RunPaths
from swaptrain.store.slots.recovery_rules import Action, Decision, Found, decide, last_commit

__all__ = ["StorePosition", "store_position"]

Record = Mapping[str, Any]
Again = Callable[[str, int], Unit | None]


@dataclass(frozen=True)
class StorePosition:
    """What a resume would find by the records alone; the chunks that they name are not read."""

    decision: Decision | None
    """None where the records contradict each other."""
    needed: tuple[Unit, ...]
    """The hand-off and gradients that the step goes on from."""
    damages: tuple[DamagedStoreError, ...]
    stamp: object

    def text(self) -> str:
        """Return where the store is, in words that follow "is"."""
        if self.decision is None:
            return "at no step: its records do not fit together"
        done = self.decision.done
        if self.decision.action is Action.CONTINUE:
            return f"inside step {self.decision.step}, behind segment {self.decision.segment + 1}"
        if self.decision.pending:
            return f"at step {done}, its update pending in {len(self.decision.pending)} segments"
        return f"at step {done}"


def store_position(
    run_dir: Path, root: RootRecord, live: Mapping[int, Unit], again: Again
) -> StorePosition:
    """Return the position of a run whose live slots' records all verify.

    By the rules of `run/resume.py`, without its model. `again` finds a needed unit once more,
    by its title and segment.
    """
    records = {k: unit.record for k, unit in live.items() if unit.record is not None}
    deferred = bool(root.choices.get("deferred"))
    torn: list[DamagedStoreError] = []
    settled = None
    if deferred and root.commit_every == 1:
        settled = _kept(run_dir, root, records, torn)
    commits = records if settled is None else settled
    last = None
    if root.commit_every == 1:
        last = last_commit(_steps(records), None if settled is None else _steps(settled))
    lowest = last[0] if last is not None else 0
    found = Found(
        versions=_versions(records, root),
        gradients=None if settled is None else _versions(settled, root),
        handoffs=frozenset(() if last is None else {last}),
        commit_every=root.commit_every,
        root_step=root.step,
    )
    stamp = (records, settled)
    try:
        decision = decide(found)
    except DamagedStoreError as error:
        # As in a resume: a file that keeps the rest from being understood is named instead.
        return StorePosition(None, (), tuple(torn) or (error,), stamp)
    needed: list[Unit] = []
    needed_of = set(decision.pending)
    if decision.action is Action.CONTINUE:
        record = commits[lowest]
        path = live[lowest].path / ZARR_JSON
        if settled is not None:
            path = _record_path(run_dir, lowest)
            needed_of = {k for k in settled if k > decision.segment}
        needed.append(_handoff_unit(run_dir, lowest, path, record, again))
    for k in sorted(needed_of):
        needed.append(_gradient_unit(run_dir, k, commits[k], again))
    return StorePosition(decision, tuple(needed), (), stamp)


def _steps(records: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    return {k: int(record["version"]) for k, record in records.items()}


def _versions(of: Mapping[int, Record], root: RootRecord) -> tuple[int | None, ...]:
    indices = [int(row["segment"]) for row in root.segments]
    return tuple(int(of[k]["version"]) if k in of else None for k in indices)


def _kept(
    run_dir: Path,
    root: RootRecord,
    segments: Mapping[int, Record],
    torn: list[DamagedStoreError],
) -> dict[int, Record]:
    """Return the records of finished gradients; what is wrong with others goes to `torn`."""
    kept: dict[int, Record] = {}
    for k in segments:
        try:
            record = read_kept(_record_path(run_dir, k), k)
        except DamagedStoreError as error:
            torn.append(error.within(Where(segment=k)))
            continue
        if record["fingerprint"] == root.fingerprint:
            kept[k] = record
    return kept


def _handoff_unit(run_dir: Path, k: int, path: Path, record: Record, again: Again) -> Unit:
    """Return the gradients that the commit of segment `k` handed on."""
    arrays = [
        (RunPaths(run_dir).spilled("gradients", row["name"]), row.get("row"), row["checksums"])
        for row in record["handoff"].get("gradients", [])
    ]
    return spilled_unit("hand-off", k, path, record, arrays, lambda: again("hand-off", k))


def _gradient_unit(run_dir: Path, k: int, record: Record, again: Again) -> Unit:
    """Return the finished gradient of a segment, where it was spilled to, and its buffers."""
    paths = RunPaths(run_dir)
    arrays = [
        (paths.spilled("accumulators" if name == "gradient" else "kept", k) / name, None, sums)
        for name, sums in record["checksums"].items()
    ]
    path = _record_path(run_dir, k)
    return spilled_unit("gradient", k, path, record, arrays, lambda: again("gradient", k))


def _record_path(run_dir: Path, k: int) -> Path:
    return RunPaths(run_dir).gradient_record(k)
