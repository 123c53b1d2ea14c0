"""The end of a run: whether it is reached, a second copy of its state, and the last words."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.observe.eval_history import EvalHistory
from swaptrain.observe.metrics import read_rows
from swaptrain.run.idle_rates import go_on_keys
from swaptrain.run.signals import StopRequest
from swaptrain.run.steps.training import Training
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.run_position import read_position
from swaptrain.store.read.stored_segments import stored_segments
from swaptrain.store.slots.slot_bytes import copy_slot
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import list_snapshots

__all__ = ["finish", "finished_step", "finished_text", "separate_all"]


def finished_step(run_dir: Path, root: RootRecord, config: Config) -> int | None:
    """Return the step of a run that has done `train.steps`; None where anything is left to do.

    Raises DamagedStoreError when a record does not verify, or the run cannot go on.
    """
    paths = RunPaths(run_dir)
    if paths.spill.exists():
        return None  # a run that is not at its end, or has not yet deleted what only training needs
    stored = stored_segments(run_dir, root)
    live = {one.segment: one.record for one in stored if one.record is not None}
    position = read_position(paths, root, live)
    position.decided()
    is_whole = position.is_whole and not position.pending
    return position.done if is_whole and position.done >= config.train.last_step else None


def finish(training: Training, stop: StopRequest) -> None:
    """Delete what only training needs: free slots, values, hand-offs.

    A last step that is also a snapshot gets slots of its own first, so that it is on the disk
    twice. A kill in the middle is completed by the next start, and so is a disk that cannot
    delete everything now: the run is complete, so that is no failure.
    """
    training.commits.drain()
    training.metrics.give_back()
    if training.trees is not None:
        training.trees.finish()
    training.tier.close()
    training.pool.trim()
    separate_all(
        training.slots,
        list(training.plan.layouts.state),
        training.io,
        step=training.step - 1,
        note=training.note,
        stop=stop,
    )
    if training.values is not None:
        training.values.close()
    # On FUSE and NFS a file that is open while it is deleted stays, under another name.
    training.io.close()
    spill = RunPaths(training.config.run.dir).spill
    try:
        training.slots.delete_free()
        shutil.rmtree(spill)
    except OSError as error:
        training.note(
            f"{error.filename or spill} could not be deleted "
            f"({error.strerror}): it is of no use any more. The same command deletes it, or you"
        )


def separate_all(
    slots: Slots,
    segments: Sequence[int],
    io: DirectIO,
    *,
    step: int,
    note: Callable[[str], None],
    stop: StopRequest,
) -> None:
    """Copy the live slots that the snapshot of the last step holds too: two copies on the disk.

    The copies become the live ones. At every moment of it, and whenever it is killed, these hold
    the same; done again it does the rest. Raises RunError, DamagedStoreError, StoppedBySignal.
    """
    tree = slots.tree()
    live = {k: slots.live(k, tree=tree) for k in segments}
    shared = {k: slot for k, slot in live.items() if slots.is_held(slot)}
    if shared:
        note(f"copying step {step}, so that its snapshot is a second copy")
    for number, (k, slot) in enumerate(shared.items(), 1):
        what = f"copying segment {number}/{len(shared)} of step {step}"
        stop.doing(what)
        free = slots.take(slot.id.rpartition("-")[0])
        assert free is not None, "a snapshot that shares the live slots leaves as many free"
        copy_slot(slot, free, io, segment=k, version=step)
        slots.switch(k, free, tree=tree)
        stop.check_after(what)


def _best_step(run_dir: Path) -> tuple[int, float] | None:
    """Return the snapshot of lowest held-out loss, and that loss."""
    losses = EvalHistory(read_rows(RunPaths(run_dir).metrics)).losses
    found = [(losses[s.step], s.step) for s in list_snapshots(run_dir) if s.step in losses]
    return min(found)[::-1] if found else None


def finished_text(run_dir: Path, step: int, config: Config) -> str:
    """Return what the command says at the end: where the run is and what to try next."""
    start = "python -m swaptrain"
    export = f"{start} export {run_dir}"
    if config.lora is not None:
        taken = f"{export} --adapter {run_dir}/adapter"
    elif config.model.hf is not None:
        taken = f"{export} --to {run_dir}/model"
    else:
        taken = f"{export} --to {run_dir}/weights.safetensors"
    best = _best_step(run_dir) if config.store.keep is not None and config.store.keep.best else None
    if best is not None and best[0] != step:
        taken += f"\n  take the best  {export} --step {best[0]} ... (eval {best[1]:.4f})"
    return (
        f"finished: step {step} of {step} is in {run_dir}\n"
        f"  look at it     {start} inspect {run_dir}\n"
        f"  take weights   {taken}\n"
        f"  go on          the same command with {go_on_keys(config, step)}"
    )
