"""Starts a run over: all that it wrote into its directory goes, but its data and its id."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.store.disk.durable_files import flush_directory, flush_file_system, write_aside
from swaptrain.store.format.origin import read_origin
from swaptrain.store.format.record import read_record
from swaptrain.store.paths import TREES, ZARR_JSON, RunPaths
from swaptrain.store.slots.slot_disks import delete_slots

__all__ = ["begun_otherwise", "start_over"]


def begun_otherwise(run_dir: Path, fingerprint: str, origin: Mapping[str, Any] | None) -> bool:
    """Whether an unfinished creation left segments of another model, cut, or checkpoint."""
    try:
        other_origin = read_origin(run_dir) != origin
    except DamagedStoreError:
        other_origin = True
    paths = RunPaths(run_dir)
    directories = (paths.segments(), paths.segments(TREES[0]))
    for link in (link for directory in directories for link in directory.glob("*")):
        if not link.is_symlink():
            continue
        try:
            record = read_record(link / ZARR_JSON)
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
    paths = RunPaths(run_dir)
    write_aside(paths.starting_over, b"")
    delete_slots(run_dir, list(paths.slots.glob("*")))
    for path in paths.folders:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    for path in paths.files:
        path.unlink(missing_ok=True)
    flush_file_system(run_dir)
    paths.starting_over.unlink()
    flush_directory(run_dir)
