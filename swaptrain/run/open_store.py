"""Opens the store of a run for writing: everything reserved, version 0 there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.observe.eval_history import EvalHistory
from swaptrain.observe.metrics import MetricsFile
from swaptrain.planning.budgets.disk_budget import keeping, snapshot_count
from swaptrain.planning.prepare import Prepared
from swaptrain.run.create_store import Creation, open_slots, root_record
from swaptrain.run.signals import StopRequest
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import RootRecord, create_root
from swaptrain.store.paths import TREES, RunPaths
from swaptrain.store.slots.recovery_rules import flush_everything
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import clear_unfinished, drop_surplus

__all__ = ["look_at_store", "open_store"]


def open_store(
    config: Config,
    prepared: Prepared,
    root: RootRecord | None,
    backing: DiskBacking,
    io: DirectIO,
    *,
    note: Callable[[str], None],
    count: Callable[[int, int, str], None],
    stop: StopRequest,
    together: Callable[[int, Callable[[], None]], None] | None = None,
) -> tuple[Slots, RootRecord]:
    """Reserve the space of the whole run, and write version 0 if `root` is None: the run begins.

    `count` hears how many segments are written. `together` calls the first switch when all ranks of
    the run have version 0. Returns the slots and the root's record. Raises RunError (disk full),
    StoppedBySignal.
    """
    plan, run_dir, keep = prepared.plan, config.run.dir, config.store.keep
    trees = config.store.commit.is_whole
    flush_everything(run_dir)
    clear_unfinished(run_dir)
    slots = Slots(run_dir, config.store.paths, trees=trees)
    if keep is not None:
        drop_surplus(slots, keeping(keep), _losses(run_dir) if keep.best else {})
    snapshots = snapshot_count(config)
    open_slots(slots, plan.layouts, plan, trees=trees, snapshots=snapshots)
    creation = Creation(run_dir, plan, slots, backing, io)
    if root is None:
        origin = prepared.built.initial.origin
        source = f" of {origin['directory']}" if origin is not None else ""
        parameters = plan.captured.model.parameter_count
        note(f"writing {parameters:,} initial weights{source} to {run_dir}")
        root = _create(config, prepared, creation, slots, count, stop, together)
    else:
        creation.open()
    prepared.built.initial.forget()
    return slots, root


def look_at_store(config: Config, prepared: Prepared, backing: DiskBacking) -> Slots:
    """Open a store of which a step is only looked at: nothing is reserved, nothing written."""
    slots = Slots(config.run.dir, trees=config.store.commit.is_whole)
    backing.files.create_journal()
    prepared.built.initial.forget()
    return slots


def _losses(run_dir: Path) -> dict[int, float]:
    with MetricsFile(RunPaths(run_dir).metrics) as metrics:
        return EvalHistory(metrics.rows()).losses


def _create(
    config: Config,
    prepared: Prepared,
    creation: Creation,
    slots: Slots,
    count: Callable[[int, int, str], None],
    stop: StopRequest,
    together: Callable[[int, Callable[[], None]], None] | None,
) -> RootRecord:
    plan, trees = prepared.plan, config.store.commit.is_whole
    segments = len(plan.captured.model.segments)

    def tick(k: int) -> None:
        count(k, segments, "segment")
        stop.check_after(f"writing segment {k}/{segments}")
        stop.doing(f"writing segment {min(k + 1, segments)}/{segments}")

    stop.doing(f"writing segment 1/{segments}")
    creation.write(prepared.built.initial, tick, trees=trees)
    root = root_record(
        config,
        plan,
        prepared.built,
        threads=prepared.threads,
        device=prepared.device.device,
    )
    if trees:
        create_root(config.run.dir, root, tree=TREES[0])
        if together is None:
            slots.switch_tree()
        else:
            together(0, slots.switch_tree)
    else:
        create_root(config.run.dir, root)
    return root
