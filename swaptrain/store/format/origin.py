"""Which checkpoint a run began from, beside its store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.store.disk.durable_files import flush_directory, write_aside
from swaptrain.store.format.record import encode_record, read_record
from swaptrain.store.paths import RunPaths

__all__ = ["origin_text", "read_origin", "record_origin"]


def record_origin(run_dir: Path, origin: Mapping[str, Any] | None) -> None:
    """Write down which checkpoint a run begins from, durably, or that it is none.

    `origin` has a `directory` and `files`, what tells each file from others.
    """
    path = RunPaths(run_dir).initial_weights
    if origin is not None:
        write_aside(path, encode_record(origin))
    elif path.exists():
        path.unlink()
        flush_directory(run_dir)


def origin_text(run_dir: Path) -> str | None:
    """Return the directory of the checkpoint that a run began from; None where it is none.

    Nothing that trains depends on it: where the record is damaged the text says so.
    """
    try:
        origin = read_origin(run_dir)
    except DamagedStoreError:
        return f"unknown: {RunPaths(run_dir).initial_weights.name} does not verify"
    return None if origin is None else str(origin["directory"])


def read_origin(run_dir: Path) -> Mapping[str, Any] | None:
    """Return what `record_origin` wrote; None where there is nothing.

    Raises DamagedStoreError when it does not verify.
    """
    path = RunPaths(run_dir).initial_weights
    if not path.exists():
        return None
    origin = read_record(path)
    if not isinstance(origin.get("directory"), str):
        raise DamagedStoreError("it names no directory", path=path)
    return origin
