"""starts.jsonl: one JSON object for each start of training, for people; no start reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swaptrain.errors import RunError
from swaptrain.store.disk.durable_files import flush_directory
from swaptrain.strict_json import parse_json

__all__ = ["Expected", "StartLine", "read_starts", "record_start"]

_LONGEST_BYTES = 2**16
"""Of a line: they have about 800."""
_MOST_LINES = 10_000


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The forecast of a step in the middle of a run."""

    step_s: float | None
    """None where the disk was not measured."""
    compute_s: float
    """Of forwards, backwards and updates, with no I/O beside them."""
    read_bytes: int | None
    """None where the program is too long to be rehearsed, as for what is written."""
    write_bytes: int | None
    least_traffic_bytes: float
    """The lower bound of what a step reads and writes, with this pool as the cache."""
    host_bytes: int
    """memory.host."""
    base_bytes: int
    """Resident before training."""
    pool_bytes: int
    """Of memory.host, for slabs."""
    arena_bytes: int
    """Of memory.host, for what torch allocates."""
    peak_host_bytes: int
    """The most that is expected beyond the base."""
    segments_saving: int
    """Segments that save what the others recompute."""


@dataclass(frozen=True, kw_only=True)
class StartLine:
    """A process that begins to train: what it is, where it runs, and what it expects."""

    time: float
    """Seconds since 1970 (UTC)."""
    host: str
    pid: int
    versions: Mapping[str, str]
    """Of swaptrain, torch, transformers and python."""
    machine: Mapping[str, str]
    """As the fingerprint has it: processor, device."""
    device: str
    threads: int
    parameters: int
    segments: int
    first_step: int
    """The step that it begins with, or goes on inside."""
    last_step: int
    """That it was asked for."""
    forecast: Expected


def record_start(path: Path, line: StartLine, note: Callable[[str], None]) -> None:
    """Append a line and flush it; where that cannot be done, `note` says so and all goes on.

    A line that a crash tore is closed first, so that it spoils no other.
    """
    try:
        content = json.dumps(asdict(line), allow_nan=False).encode() + b"\n"
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                content = b"\n" + content
            while content:
                content = content[os.write(descriptor, content) :]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            flush_directory(path.parent)
    except (OSError, RunError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        note(f"{path} cannot be written ({reason}): the run goes on without this line")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the lines that are objects with a time, in their order; a torn one is left out."""
    found: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(_LONGEST_BYTES), b""):
                try:
                    start = parse_json(line)
                except ValueError:
                    continue
                if isinstance(start, dict) and type(start.get("time")) in {int, float}:
                    found.append(start)
                if len(found) == _MOST_LINES:
                    break
    except FileNotFoundError:
        return []
    return found
