"""Starts a run over: its state goes; its data, metrics and snapshots stay."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.run.run_names import FILES, FOLDERS, STARTING_OVER
from swaptrain.store.disk.durable_files import flush_directory, flush_file_system, write_aside
from swaptrain.store.format.origin import read_origin
from swaptrain.store.format.record import read_record
from swaptrain.store.format.root import segments_directory
from swaptrain.store.slots.slot_disks import delete_slots
from swaptrain.store.slots.slots import TREES

__all__ = ["begun_otherwise", "start_over"]


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
