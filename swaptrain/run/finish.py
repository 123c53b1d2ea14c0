"""The end of a run: whether it is reached, a second copy of its state, and the last words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.run.idle_rates import go_on_keys
from swaptrain.run.signals import StopRequest
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.held_segments import held_segments
from swaptrain.store.read.run_position import read_position
from swaptrain.store.slots.slot_bytes import copy_slot
from swaptrain.store.slots.slots import Slots

__all__ = ["finished_step", "finished_text", "separate_all"]


def finished_step(run_dir: Path, root: RootRecord, config: Config) -> int | None:
    """Return the step of a run that has done `train.steps`; None where anything is left to do.

    Raises DamagedStoreError when a record does not verify, or the run cannot go on.
    """
    paths = RunPaths(run_dir)
    if paths.spill.exists():
        return None  # a run that is not at its end, or has not yet deleted what only training needs
    held = held_segments(run_dir, root)
    live = {one.segment: one.record for one in held if one.record is not None}
    position = read_position(paths, root, live)
    position.decided()
    is_at_end = position.is_whole and not position.pending and position.done >= config.train.steps
    return position.done if is_at_end else None


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
        spare = slots.take(slot.id.rpartition("-")[0])
        assert spare is not None, "a snapshot that shares the live slots leaves as many free"
        copy_slot(slot, spare, io, segment=k, version=step)
        slots.switch(k, spare, tree=tree)
        stop.check_after(what)


def finished_text(run_dir: Path, step: int, config: Config) -> str:
    """Return what the command says at the end: where the run is and what to try next."""
    start = "python -m swaptrain"
    return (
        f"finished: step {step} of {step} is in {run_dir}\n"
        f"  look at it     {start} inspect {run_dir}\n"
        f"  take weights   {start} export {run_dir} --to {run_dir}/weights.safetensors\n"
        f"  go on          the same command with {go_on_keys(config, step)}"
    )
