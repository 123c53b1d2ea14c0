"""Opens a run as it is on the disk, and judges whether it is the last committed state."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.errors import DamagedStoreError
from swaptrain.observe.metrics import MetricsFile
from swaptrain.run.go_back import complete_going_back
from swaptrain.run.resume import find_resume_point
from swaptrain.run.run_names import check_own
from swaptrain.run.start_over import begun_otherwise
from swaptrain.store.access.lock import RunLock
from swaptrain.store.format.record import decode_record, read_record
from swaptrain.store.format.root import read_root
from swaptrain.store.format.state_record import SlotRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.recovery_rules import Action, Decision
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import list_snapshots
from tests.support.killing import KEYS
from tests.support.recording import Event
from tests.support.recording_runs import Job, data_files

__all__ = ["Found", "Known", "Promises", "judge", "look"]

_WRITTEN = ("remainder", "weights", "frozen", "buffers")
"""Arrays that creation writes; the others begin as the zeros of reserved files."""


class Promises:
    """What a run was told is done."""

    def __init__(self, *, trees: bool) -> None:
        self._trees = trees
        self.data = False
        self.reset()

    def reset(self) -> None:
        """Promise nothing but the data: a run was started over."""
        self.created = False
        self.versions: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        """By segment: finished gradients beside the slots."""
        self._line = self.tree = self.snapshot = 0

    def take(self, mark: tuple[Any, ...]) -> None:
        """Take in a mark of a recording."""
        match mark:
            case ("created",):
                self.created = True
            case ("data",):
                self.data = True
            case ("line", step):
                self._line = step
            case ("tree", step):
                self.tree = step
            case ("committed", segment, version):
                self.versions[segment] = version
            case ("finished", segment, version):
                self.finished[segment] = version
            case ("snapshot", step):
                self.snapshot = step
            case ("fresh",):
                self.reset()
            case ("back",):
                self.versions, self.finished = {}, {}
                self._line = self.tree = self.snapshot = 0

    @property
    def line(self) -> int:
        """The last line of metrics that stays: between commits of trees, lines may go."""
        return min(self._line, self.tree) if self._trees else self._line


class Known:
    """What the uninterrupted run wrote: records by what they are of, lines, tokens, configs."""

    def __init__(self, events: Iterable[Event], lines: list[list[Any]], data: dict[str, bytes]):
        self.lines, self.data = lines, data
        self.records: dict[tuple[Any, ...], Any] = {}
        self.configs: set[bytes] = set()
        for event in events:
            if event.kind != "write":
                continue
            if event.path.endswith(("/zarr.json", "/record.json")) and not event.offset:
                self._add(event)
            if event.path.endswith("/config.yaml.tmp"):
                self.configs.add(event.data)

    def _add(self, event: Event) -> None:
        try:
            record = decode_record(event.data, Path(event.path))
        except (DamagedStoreError, ValueError, KeyError):
            return  # a blank one, or the metadata of an array
        if "segment" in record:
            key, value = _identity(event.path, record), _contents(record)
            assert self.records.setdefault(key, value) == value, f"{key} was written twice, unequal"

    def same(self, path: Path, record: dict[str, Any]) -> bool:
        """Whether a record says what the uninterrupted run's says of the same thing."""
        return self.records.get(_identity(str(path), record)) == _contents(record)


def _identity(path: str, record: dict[str, Any]) -> tuple[Any, ...]:
    kind = next((part for part in ("finished", "frozen") if f"/{part}/" in path), "state")
    return kind, record["segment"], record["version"]


def _contents(record: dict[str, Any]) -> tuple[Any, ...]:
    checksums = {name: list(sums) for name, sums in record["checksums"].items()}
    return checksums, list(record["losses"]), record["norms"]


@dataclass
class Found:
    """What opening a run finds."""

    wrong: list[str] = field(default_factory=list)
    """What no state of a disk may show."""
    root: bool = False
    root_step: int = 0
    decision: Decision | None = None
    versions: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    lines: list[list[Any]] = field(default_factory=list)
    """Of metrics.jsonl, behind the cut."""
    completes: bool = False
    """Whether the records have what a missing last line says."""
    data: bool = False
    snapshots: list[int] = field(default_factory=list)
    changed: bool = False
    """Whether opening it changed more than the lock and metrics.jsonl."""

    @property
    def position(self) -> str:
        """Where the run goes on, in a word."""
        if self.decision is None:
            return "create"
        return f"{self.decision.action} {self.decision.step}.{self.decision.segment}"


def look(job: Job, known: Known) -> Found:
    """Open the run that the disks hold, as a start does, and read everything that counts.

    Changes the lock and metrics.jsonl, nothing else.
    """
    found = Found()
    try:
        _look_at_data(job, known, found)
        check_own(job.run_dir)
        # A directory that is being emptied is emptied to the end, whatever it shows.
        if job.run_dir.is_dir() and not RunPaths(job.run_dir).starting_over.exists():
            with RunLock(job.run_dir):
                _look(job, known, found)
    except Exception as error:
        found.wrong.append("".join(traceback.format_exception(error)[-3:]))
    return found


def _look_at_data(job: Job, known: Known, found: Found) -> None:
    """Tokens whose marker is there are whole."""
    tokens = data_files(job.disks)
    found.data = set(tokens) == set(known.data)
    for name, content in tokens.items():
        if known.data.get(name) != content:
            found.wrong.append(f"complete tokens differ in {name}")
    record = job.run_dir / "data" / "train.json"
    if record.exists():
        json.loads(record.read_bytes())


def _look(job: Job, known: Known, found: Found) -> None:
    run_dir, plan = job.run_dir, job.prepared.plan
    config = run_dir / "config.yaml"
    if config.exists() and config.read_bytes() not in known.configs:
        found.wrong.append("config.yaml is not what was written")
    root = read_root(run_dir)
    found.root = root is not None
    if root is None:
        _look_at_creation(job, known, found)
        return
    if not config.exists():
        found.wrong.append("there is a store without config.yaml")
    if RunPaths(run_dir).going_back.exists():
        found.changed = True
        root = complete_going_back(run_dir, root, lambda _: None)
    for slot in (run_dir / "slots").iterdir():
        if not slot.exists():
            found.wrong.append(f"{slot.name} is a link to nothing: its disk seems to be missing")
    found.root_step = root.step
    slots = Slots(run_dir, job.config.store.paths, trees=root.is_whole)
    backing = DiskBacking(
        run_dir,
        plan.layouts,
        job.io,
        micro_batches=job.config.data.micro_batches,
        deferred=plan.builder.deferred,
    )
    position = find_resume_point(plan.layouts, slots, backing, root)
    found.decision = position.decision
    for k in plan.layouts.state:
        slot = backing.slot(k)
        record = slot.read_record(k)
        found.versions[k] = record.version
        if not known.same(slot.record_path, record.attributes()):
            found.wrong.append(f"segment {k} has other content of version {record.version}")
        _verify_arrays(slot, record, found)
        _look_at_finished(backing.files.record(k), known, found)
    for location in backing.locations():
        (path, first, row), checksums = location.place, location.checksums or ()
        _verify(path if row is None else path / "c" / str(row), first, checksums, row, found)
    _look_at_metrics(run_dir, position.decision.done, found)
    found.completes = bool(position.finished.losses)
    for snapshot in list_snapshots(run_dir):
        found.snapshots.append(snapshot.step)
        if snapshot.record.fingerprint != root.fingerprint:
            found.wrong.append(f"the snapshot of step {snapshot.step} is of another model")
        for k, slot in snapshot.slots.items():
            _look_at_snapshot(k, slot, snapshot.step, known, found)


def _look_at_finished(path: Path, known: Known, found: Found) -> None:
    try:
        record = read_record(path)
    except DamagedStoreError:
        return
    found.finished[record["segment"]] = int(record["version"])
    if not known.same(path, record):
        found.wrong.append(f"{path} has other content")


def _look_at_snapshot(k: int, slot: Slot, step: int, known: Known, found: Found) -> None:
    record = slot.read_record(k)
    if record.version != step or not known.same(slot.record_path, record.attributes()):
        found.wrong.append(f"segment {k} of the snapshot of step {step} has other content")
    _verify_arrays(slot, record, found)


def _verify_arrays(slot: Slot, record: SlotRecord, found: Found) -> None:
    for name, checksums in record.checksums.items():
        _verify(slot.path / name, 0, checksums, None, found)


def _look_at_metrics(run_dir: Path, done: int, found: Found) -> None:
    with MetricsFile(run_dir / "metrics.jsonl") as metrics:
        metrics.cut_after(done)
        found.lines = [[row.get(key) for key in KEYS] for row in metrics.rows()]


def _look_at_creation(job: Job, known: Known, found: Found) -> None:
    """What an unfinished creation left, and the next start keeps, is whole, free slots blank."""
    fingerprint = job.prepared.plan.captured.model.fingerprint
    if begun_otherwise(job.run_dir, fingerprint, None):
        found.wrong.append("an unfinished creation looks like that of another model")
    tree = "a" if job.config.store.commit.is_whole else None
    live = set()
    for link in RunPaths(job.run_dir).segments(tree).glob("[0-9]*"):
        try:
            record = read_record(link / "zarr.json")
        except DamagedStoreError:
            continue
        if record["version"] == 0 and link.suffix != ".next":
            live.add(link.resolve().name)
            if not known.same(link / "zarr.json", record):
                found.wrong.append(f"{link} has other content")
            for name, checksums in record["checksums"].items():
                _verify(link / name, 0, checksums, None, found)
    for slot in (job.run_dir / "slots").glob("*"):
        for array in slot.glob("*/c"):
            blank = slot.name in live or array.parent.name.startswith(_WRITTEN)
            if not blank and any(chunk.read_bytes().strip(b"\0") for chunk in array.iterdir()):
                found.wrong.append(f"the free {array} is not blank")


def _verify(
    path: Path, first: int, checksums: Sequence[int], row: int | None, found: Found
) -> None:
    folder = path / "c" if row is None else path
    for number, expected in enumerate(checksums, first):
        chunk = folder / str(number)
        if not chunk.exists() or xxhash.xxh3_64_intdigest(chunk.read_bytes()) != expected:
            found.wrong.append(f"{chunk} does not verify")


def judge(found: Found, promised: Promises, known: Known, *, deferred: bool) -> list[str]:
    """Return what is wrong with a state that the disk shows after these promises.

    `deferred`: gradients are committed one by one, and updates a step later.
    """
    wrong = list(found.wrong)
    if promised.data and not found.data:
        wrong.append("tokens that were complete are gone")
    if promised.created and not found.root:
        wrong.append("a store that was created is gone")
    decision = found.decision
    if decision is None or wrong:
        return wrong
    for k, version in promised.versions.items():
        if found.versions.get(k, -1) < version:
            wrong.append(f"segment {k} was committed as {version}, is {found.versions.get(k)}")
    for k, version in promised.finished.items():
        if max(found.versions.get(k, -1), found.finished.get(k, -1)) < version:
            wrong.append(f"the gradient of segment {k} was finished as {version}, is lost")
        goes_on = decision.action is Action.CONTINUE and decision.segment < k
        if deferred and version == decision.step and not goes_on:
            wrong.append(f"the backward of segment {k} in step {version} is to be done again")
    if found.root_step < promised.tree:
        wrong.append(f"step {promised.tree} was committed, the root says {found.root_step}")
    done, lines = decision.done, found.lines
    if lines != known.lines[: len(lines)]:
        wrong.append(f"the lines of metrics are {lines}")
    if not done - 1 <= len(lines) <= done or (len(lines) < done and not found.completes):
        wrong.append(f"step {done} is done and there are {len(lines)} lines of metrics")
    if promised.snapshot and promised.snapshot not in found.snapshots:
        wrong.append(f"the snapshot of step {promised.snapshot} is gone")
    if len(lines) < promised.line:
        wrong.append(f"line {promised.line} of metrics was written, there are {len(lines)}")
    return wrong
