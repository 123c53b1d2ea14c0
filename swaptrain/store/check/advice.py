"""What to do about a damaged store, by what its run directory still has."""

from __future__ import annotations

from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.snapshots import list_snapshots

__all__ = ["advice"]


def advice(error: DamagedStoreError) -> list[str]:
    """Return what follows the message of an error, nothing where it names no file of a run."""
    path = error.path.absolute() if error.path is not None else Path()
    run_dir = next((p for p in path.parents if RunPaths(p).config.is_file()), None)
    if run_dir is None:
        return []
    lists = f"`python -m swaptrain verify {run_dir}` lists all that is damaged"
    if list_snapshots(run_dir):
        return [f"{lists}, and with --repair mends what a snapshot has a copy of"]
    return [lists, "restore it from a backup, or start over with --fresh"]
