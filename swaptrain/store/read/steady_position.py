"""Where a run stands while a process may be training in it."""

from __future__ import annotations

import time

from swaptrain.store.paths import RunPaths
from swaptrain.store.read.live_store import LiveStore, look
from swaptrain.store.read.run_position import RunPosition, read_position

__all__ = ["steady_position"]

_TRIES = 10
_PAUSE_S = 0.05


def steady_position(paths: RunPaths) -> tuple[LiveStore | None, RunPosition | None]:
    """Return what is live and where the run stands, of one moment, beside a process that trains.

    No store where its creation was never finished; no position where there is no store, or where
    steps are shorter than a look at all records. Raises DamagedStoreError for records of live
    slots.
    """
    for _ in range(_TRIES):
        store = look(paths.run_dir)
        if store is None:
            return None, None
        position = read_position(paths, store.root, store.records)
        if not store.has_changed():
            return store, position
        time.sleep(_PAUSE_S)
    return store, None
