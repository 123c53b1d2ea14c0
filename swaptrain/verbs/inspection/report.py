"""What a run directory holds, read without writing, waiting or building the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.store.access.lock import lock_owner
from swaptrain.store.format.origin import origin_text
from swaptrain.store.format.root import RootRecord, RootRow
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.live_store import LiveStore
from swaptrain.store.read.run_position import Phase, RunPosition
from swaptrain.store.read.steady_position import steady_position
from swaptrain.store.read.stored_segments import StoredSegment
from swaptrain.store.slots.snapshots import list_snapshots
from swaptrain.strict_json import parse_json
from swaptrain.units import how_many

__all__ = ["RunReport", "SegmentRow", "SnapshotRow", "last_rows", "read_run"]

_TAIL_BYTES = 2**16
_LARGEST_FIGURE = 1e30


@dataclass(frozen=True)
class SegmentRow:
    """One segment, as its live slot is now."""

    index: int
    module: str
    parameters: int
    """Names, not elements."""
    version: int | None
    """The step after which the state is as it is; None where nothing is ever updated."""
    slot: str
    size_bytes: int


@dataclass(frozen=True)
class SnapshotRow:
    """An earlier step that is kept."""

    step: int
    own_bytes: int
    """Of the slots that neither the live state nor a later snapshot has."""


@dataclass(frozen=True)
class RunReport:
    """A run directory at one moment."""

    path: Path
    config: Config
    root: RootRecord | None
    """None where the creation of the store was never finished."""
    segments: tuple[SegmentRow, ...]
    writer: str | None
    """Pid and host of the process that has the run open; None where there is none."""
    done: int
    """The last step that is done."""
    state: str
    """Where the run is, in words."""
    rows: tuple[dict[str, Any], ...]
    """The last lines of metrics.jsonl."""
    disk_bytes: int
    snapshots: tuple[SnapshotRow, ...] = ()
    origin: str | None = None
    """The directory of the checkpoint that it began from; None: from the constructor's weights."""


def read_run(path: Path, *, lines: int = 5) -> RunReport:
    """Return what a run directory holds.

    A run that is training changes while it is read: it is looked at until two looks are the same.
    Raises ConfigError for what is no run, DamagedStoreError for what does not verify.
    """
    paths = RunPaths(path)
    if not paths.config.is_file():
        raise ConfigError(f"{path} is no run: it has no config.yaml; give the run.dir of a config")
    writer = lock_owner(path)
    live, position = steady_position(paths)
    # After the store: the config of one of another format has other keys.
    config = load_config(paths.config, ())
    done, state = _state(live, position, config.train.last_step)
    rows = zip(live.segments, live.root.segments, strict=True) if live is not None else ()
    return RunReport(
        path=path,
        config=config,
        root=live.root if live is not None else None,
        segments=tuple(_segment(stored, row) for stored, row in rows),
        writer=str(writer) if writer is not None else None,
        done=done,
        state=state,
        rows=tuple(last_rows(paths.metrics, lines)),
        disk_bytes=_disk_bytes(path),
        snapshots=tuple(_snapshots(path, live)),
        origin=origin_text(path),
    )


def _snapshots(path: Path, live: LiveStore | None) -> list[SnapshotRow]:
    stored = live.segments if live is not None else ()
    seen = {one.state.id for one in stored if one.state is not None}
    rows = []
    for snapshot in reversed(list_snapshots(path)):
        try:
            own = [slot for slot in snapshot.slots.values() if slot.id not in seen]
        except FileNotFoundError:
            continue  # dropped while the run goes on
        seen.update(slot.id for slot in own)
        own_bytes = sum(_disk_bytes(slot.path.resolve()) for slot in own)
        rows.append(SnapshotRow(snapshot.step, own_bytes))
    return rows[::-1]


def _state(live: LiveStore | None, position: RunPosition | None, steps: int) -> tuple[int, str]:
    """Return the last step done, and in words where the run is."""
    if live is None:
        return 0, "the store was not finished: run the same command to go on"
    if position is None:
        return _in_motion(live)
    done = position.done
    if position.going_back:
        return done, "going back to a snapshot: run the training command to complete it"
    if position.phase is Phase.BACKWARD:
        return done, _inside(position)
    return done, _between(done, position.pending, steps)


def _inside(position: RunPosition) -> str:
    if position.found.gradients is None:
        committed = [k for k in position.live if k > position.decided().segment]
        text = f"segments {committed[0]} to {committed[-1]} are committed"
    else:
        finished = position.gradients_used
        text = f"the gradients of segments {finished[0]} to {finished[-1]} are finished"
    return f"inside step {position.step}: {text}"


def _between(done: int, pending: Sequence[int], steps: int) -> str:
    if pending:
        return (
            f"step {done} is done, its update is pending in "
            f"{how_many(len(pending), 'segment')} ({pending[0]} to {pending[-1]})"
        )
    if done >= steps:
        return f"finished: step {done} of {steps} is done"
    return f"step {done} of {steps} is done" if done else "created, no step is done"


def _in_motion(live: LiveStore) -> tuple[int, str]:
    """Say what can be said of a store whose steps are shorter than a look at all its records."""
    versions = live.versions.values()
    oldest, newest = min(versions, default=0), max(versions, default=0)
    return max(0, oldest - 1), f"inside one of the steps {oldest} to {newest + 1}, going on"


def _segment(stored: StoredSegment, row: RootRow) -> SegmentRow:
    size_bytes = _disk_bytes(stored.frozen.path) if stored.frozen is not None else 0
    slot = "frozen" if stored.frozen is not None else "-"
    if stored.state is not None:
        slot = stored.state.id
        size_bytes += _disk_bytes(stored.state.path.resolve())
    return SegmentRow(
        stored.segment, row.module, len(row.parameters), stored.version, slot, size_bytes
    )


def last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last whole lines of metrics.jsonl that are objects."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except FileNotFoundError:
        return []
    rows = []
    for line in content[: content.rfind(b"\n") + 1].splitlines()[-count:]:
        try:
            row = parse_json(line)
        except ValueError:
            continue  # cut by the piece that was read, or torn by a crash
        if isinstance(row, dict):
            rows.append({key: value for key, value in row.items() if _is_figure(value)})
    return rows


def _is_figure(value: Any) -> bool:
    """Whether a value of a row can be shown as a number: anybody can write the file."""
    return type(value) in {int, float} and abs(value) < _LARGEST_FIGURE


def _disk_bytes(path: Path) -> int:
    """Return what the files of a run take: those below it, and in slots on other disks."""
    total = 0
    for folder, folders, names in os.walk(path):
        if Path(folder) == RunPaths(path).slots:
            linked = [Path(folder, name) for name in folders if Path(folder, name).is_symlink()]
            total += sum(_disk_bytes(link.resolve()) for link in linked)
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # deleted while the run goes on
    return total
