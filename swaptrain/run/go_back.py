"""`--from-step N`: the run becomes again what it was after step N, of which it has a snapshot.

What is to be done is recorded first, and every part of it can be done again: a kill in the middle
is completed by the next start, before it looks at anything else.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.observe.metrics import MetricsFile
from swaptrain.run.signals import StopRequest
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import flush_directory, run_error, write_aside
from swaptrain.store.format.going_back import GoingBackRecord
from swaptrain.store.format.root import RootRecord, create_root
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.recovery_rules import flush_everything
from swaptrain.store.slots.slot_bytes import verify_slot
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import (
    Snapshot,
    clear_unfinished,
    drop_snapshots,
    list_snapshots,
)

__all__ = ["complete_going_back", "find_snapshot", "go_back", "verify_snapshot"]


def find_snapshot(run_dir: Path, root: RootRecord | None, step: int) -> Snapshot:
    """Return the snapshot of a step; raises ConfigError with those that there are."""
    if root is None:
        raise ConfigError(f"--from-step {step}: there is no run in {run_dir} that could go back")
    snapshots = {snapshot.step: snapshot for snapshot in list_snapshots(run_dir)}
    if step in snapshots:
        return snapshots[step]
    steps = ", ".join(map(str, snapshots))
    found = f"there are those of {steps}" if steps else "it has none"
    advice = "" if steps else "; store.keep in the config makes them"
    raise ConfigError(f"--from-step {step}: {run_dir} has no snapshot of it, {found}{advice}")


def verify_snapshot(snapshot: Snapshot, root: RootRecord, io: DirectIO, stop: StopRequest) -> None:
    """Read all that a snapshot holds.

    Raises DamagedStoreError where something does not verify, StoppedBySignal between segments.
    """
    if snapshot.record.fingerprint != root.fingerprint:
        raise DamagedStoreError("a snapshot belongs to another model", path=snapshot.path)
    for segment, slot in snapshot.slots.items():
        what = f"verifying segment {segment} of the snapshot of step {snapshot.step}"
        stop.doing(what)
        verify_slot(slot, io, segment=segment, version=snapshot.step)
        stop.check_after(what)


def go_back(
    run_dir: Path, snapshot: Snapshot, root: RootRecord, note: Callable[[str], None]
) -> RootRecord:
    """Make a snapshot, which was verified, the state of the run; return its root. Raises RunError.

    Lines of metrics and snapshots of later steps go, and all that was spilled: the step's number
    would make the redone steps take it for theirs. The snapshot itself stays.
    """
    # Before anything else. Until all is done the live names may be of two steps: without the record
    # a start would call that damage, when the metrics and what was spilled are gone.
    write_aside(RunPaths(run_dir).going_back, GoingBackRecord(step=snapshot.step).encoded())
    return complete_going_back(run_dir, root, note)


def complete_going_back(run_dir: Path, root: RootRecord, note: Callable[[str], None]) -> RootRecord:
    """Do what the record of `go_back` says, if there is one: also what a kill cut short.

    Returns the root's record as it is then.
    """
    paths = RunPaths(run_dir)
    if not paths.going_back.exists():
        return root
    flush_everything(run_dir)
    step = GoingBackRecord.read(paths.going_back).step
    snapshot = find_snapshot(run_dir, root, step)
    later = [found for found in list_snapshots(run_dir) if found.step > step]
    with MetricsFile(paths.metrics) as metrics:
        metrics.cut_after(step)
    _delete(paths.spill)
    clear_unfinished(run_dir)
    trees = root.is_whole
    slots = Slots(run_dir, trees=trees)
    if trees:
        tree = slots.other_tree()
        slots.restore(snapshot.slots, tree=tree)
        root = root.model_copy(update={"step": step})
        # The root before the switch: else a kill in between could find a live tree without a root,
        # or with one of another step than its segments.
        create_root(run_dir, root, tree=tree)
        slots.switch_tree()
    else:
        slots.restore(snapshot.slots)
    drop_snapshots(slots, later)
    # Last, when each part is durable: nothing completes what a kill leaves without the record.
    paths.going_back.unlink()
    flush_directory(run_dir)
    dropped = ", ".join(str(found.step) for found in later)
    note(
        f"went back to step {step}: what came after it is gone"
        + (f", also the snapshots of {dropped}" if dropped else "")
    )
    return root


def _delete(path: Path) -> None:
    if path.exists():
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise run_error(error, path, "delete") from error
        flush_directory(path.parent)
