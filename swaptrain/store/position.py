"""Where a store says its run goes on, and which files beside the slots it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.recovery import Action, Decision, Found, decide
from swaptrain.store.root import RootRecord
from swaptrain.store.state_record import read_kept
from swaptrain.store.units import Unit, spilled_unit

__all__ = ["StorePosition", "store_position"]


@dataclass(frozen=True)
class StorePosition:
    """What a resume would find by the records alone; the chunks that they name are not read."""

    decision: Decision | None
    """None where the records contradict each other."""
    needed: tuple[Unit, ...]
    """The hand-off, gradients and sums that the step goes on from."""
    damages: tuple[DamagedStoreError, ...]
    stamp: object

    def text(self) -> str:
        """Return the step of the store in words."""
        if self.decision is None:
            return "no step: its records do not fit together"
        done = self.decision.done
        if self.decision.action is Action.CONTINUE:
            return f"inside step {self.decision.step}, behind segment {self.decision.segment + 1}"
        if self.decision.pending:
            return f"step {done}, its update pending in {len(self.decision.pending)} segments"
        return f"step {done}"


def store_position(
    run_dir: Path,
    root: RootRecord,
    live: Mapping[int, Unit],
    again: Callable[[str, int], Unit | None],
) -> StorePosition:
    """Return the position of a run whose live slots' records all verify.

    `again` finds a needed unit once more, by its title and segment.
    """
    records = {k: unit.record for k, unit in live.items() if unit.record is not None}
    indices = [int(row["segment"]) for row in root.segments]
    journal = bool(root.choices.get("deferred")) and root.commit_every == 1
    torn: list[DamagedStoreError] = []
    kept = _kept(run_dir, root, indices, torn)
    newest = max((int(record["version"]) for record in records.values()), default=0)
    lowest = min((k for k, r in records.items() if r["version"] == newest), default=0)
    behind = any(record["version"] != newest for record in records.values())
    interrupted = not journal and behind
    handoff = records[lowest]["handoff"].get("gradients", []) if interrupted else []
    stamp = (records, kept)
    found = Found(
        versions=tuple(int(records[k]["version"]) if k in records else None for k in indices),
        gradients=tuple(int(kept[k]["version"]) if k in kept else None for k in indices)
        if journal
        else None,
        handoffs=frozenset({(lowest, newest)} if handoff else ()),
        commit_every=root.commit_every,
        root_step=root.step,
    )
    try:
        decision = decide(found)
    except DamagedStoreError as error:
        # As in a resume: a file that keeps the rest from being understood is named instead.
        return StorePosition(None, (), tuple(torn) if journal and torn else (error,), stamp)
    needed: list[Unit] = []
    damages: list[DamagedStoreError] = []
    if decision.action is Action.CONTINUE:
        arrays = [
            (run_dir / "spill" / "gradients" / row["name"], row.get("row"), row["checksums"])
            for row in handoff
        ]
        record_path = live[lowest].path / "zarr.json"
        needed.append(
            spilled_unit(
                "hand-off",
                lowest,
                record_path,
                records[lowest],
                arrays,
                lambda: again("hand-off", lowest),
            )
        )
        first = min((int(row["micro_batch"]) for row in handoff), default=0)
        for k in records if first else ():
            if k <= decision.segment:
                if k in kept and kept[k]["version"] == decision.step:
                    needed.append(_kept_unit(run_dir, k, kept[k], again, deferred=False))
                else:
                    text = "the sums of the waves before the last one do not verify"
                    path = _kept_record_path(run_dir, k)
                    damages.append(DamagedStoreError(text, segment=k, path=path))
    for k in decision.pending:
        needed.append(_kept_unit(run_dir, k, kept[k], again, deferred=True))
    return StorePosition(decision, tuple(needed), tuple(damages), stamp)


def _kept(
    run_dir: Path, root: RootRecord, indices: list[int], torn: list[DamagedStoreError]
) -> dict[int, Mapping[str, Any]]:
    """Return the records of what is kept beside slots; what is wrong with others goes to `torn`."""
    kept: dict[int, Mapping[str, Any]] = {}
    for k in indices:
        path = _kept_record_path(run_dir, k)
        if not path.parent.is_dir():
            continue
        try:
            record = read_kept(path)
        except DamagedStoreError as error:
            torn.append(error.within(Where(segment=k)))
            continue
        if record["fingerprint"] == root.fingerprint and record["segment"] == k:
            kept[k] = record
    return kept


def _kept_unit(
    run_dir: Path,
    k: int,
    record: Mapping[str, Any],
    again: Callable[[str, int], Unit | None],
    *,
    deferred: bool,
) -> Unit:
    arrays = [
        (_kept_array(run_dir, k, name, deferred=deferred), None, sums)
        for name, sums in record["checksums"].items()
    ]
    return spilled_unit(
        "kept", k, _kept_record_path(run_dir, k), record, arrays, lambda: again("kept", k)
    )


def _kept_array(run_dir: Path, k: int, name: str, *, deferred: bool) -> Path:
    """Return where an array of what is kept lies: a finished gradient stays where it is spilled."""
    folder = "accumulators" if deferred and name == "gradient" else "kept"
    return run_dir / "spill" / folder / f"{k:03d}" / name


def _kept_record_path(run_dir: Path, k: int) -> Path:
    return run_dir / "spill" / "kept" / f"{k:03d}" / "record.json"
