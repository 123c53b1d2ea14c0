"""The two ends of a run directory: whether its run is finished, and starting over."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swaptrain.config import Config
from swaptrain.errors import DamagedStoreError
from swaptrain.execute.run_names import FILES, FOLDERS, STARTING_OVER
from swaptrain.execute.schedules.idle import go_on_keys
from swaptrain.execute.stopping import StopRequest
from swaptrain.store.direct import DirectIO
from swaptrain.store.files import flush_directory, flush_file_system, write_aside
from swaptrain.store.live import held_segments
from swaptrain.store.origin import read_origin
from swaptrain.store.record import read_record
from swaptrain.store.root import RootRecord, segments_directory
from swaptrain.store.slot_bytes import copy_slot
from swaptrain.store.slot_disks import delete_slots
from swaptrain.store.slots import TREES, Slots

__all__ = ["begun_otherwise", "finished_step", "finished_text", "separate_all", "start_over"]


def finished_step(run_dir: Path, root: RootRecord, config: Config) -> int | None:
    """Return the step of a run that has done `train.steps`; None where anything is left to do.

    Raises DamagedStoreError when a record does not verify.
    """
    if (run_dir / "spill").exists():
        return None  # a run that is not at its end, or has not yet deleted what only training needs
    held = held_segments(run_dir, root)
    versions = {segment.version for segment in held if segment.version is not None}
    step = max(versions, default=0)
    return step if versions == {step} and step >= config.train.steps else None


def begun_otherwise(run_dir: Path, fingerprint: str, origin: Mapping[str, Any] | None) -> bool:
    """Whether an unfinished creation left segments of another model, cut, or checkpoint."""
    try:
        other_origin = read_origin(run_dir) != origin
    except DamagedStoreError:
        other_origin = True
    directories = (segments_directory(run_dir), segments_directory(run_dir, TREES[0]))
    for link in (link for directory in directories for link in directory.glob("*")):
        if not link.is_symlink():
            continue
        try:
            record = read_record(link / "zarr.json")
        except DamagedStoreError:
            continue  # it was not written to its end
        if record.get("fingerprint") != fingerprint or other_origin:
            return True
    return False


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


def start_over(run_dir: Path) -> None:
    """Delete what a run wrote into its directory but its data, durably; the lock is held.

    What a kill or a power failure leaves of it would be taken for a store that is being created, or
    for a damaged one: that it is being deleted is recorded first.
    """
    write_aside(run_dir / STARTING_OVER, b"")
    delete_slots(run_dir, list((run_dir / "slots").glob("*")))
    for name in FOLDERS:
        path = run_dir / name
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    for name in FILES:
        (run_dir / name).unlink(missing_ok=True)
    flush_file_system(run_dir)
    (run_dir / STARTING_OVER).unlink()
    flush_directory(run_dir)
