"""Restores damaged files from slots that hold the same bytes: those of snapshots, and the live.

A file is written only where its bytes are known. A chunk is known by the checksum in the record of
its slot, an array's metadata too, and a record by the chunks that lie unchanged beside it.

No record is believed that is of another step than its slot is held for. A record that was exchanged
for an older one would otherwise have good chunks overwritten with older ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.check.claims import Claim
from swaptrain.store.check.findings import Finding
from swaptrain.store.check.scan import Chunk, Scanner
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import allocate, flush_directory, run_error, write_aside
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.store.format.record import read_record
from swaptrain.store.format.state_record import SlotRecord
from swaptrain.store.paths import ZARR_JSON, RunPaths
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.snapshots import list_snapshots

__all__ = ["Repair", "repair"]

PIECE_BYTES = 4 * 2**20


@dataclass
class Repair:
    """What was done, a line per finding."""

    restored: list[str] = field(default_factory=list)
    without_copy: list[str] = field(default_factory=list)


def repair(run_dir: Path, findings: Sequence[Finding], io: DirectIO) -> Repair:
    """Restore what another slot of the same segment and version has; the run's lock is held.

    Each file is flushed and read again. Raises RunError.
    """
    done = Repair()
    with Scanner(io) as scanner:
        mender = _Mender(run_dir.absolute(), io, scanner)
        for finding in findings:
            source = mender.restore(finding)
            if source is None:
                done.without_copy.append(f"no other copy: {finding}")
            else:
                done.restored.append(f"restored {finding.damage.path} from {source}")
    return done


class _Mender:
    """Restores one file at a time from the slots of a run."""

    def __init__(self, run_dir: Path, io: DirectIO, scanner: Scanner) -> None:
        self._paths, self._io, self._scanner = RunPaths(run_dir), io, scanner
        self._live = [
            Slot(self._paths.slot(Path(os.readlink(link)).name))
            for link in sorted(self._paths.segments().glob("*"))
            if link.is_symlink()
        ]
        self._snapshots: dict[int, list[Slot]] = {}
        """The slots of each snapshot, by its step, the newest first."""
        for snapshot in reversed(list_snapshots(run_dir)):
            with suppress(DamagedStoreError):
                self._snapshots[snapshot.step] = list(snapshot.slots.values())

    def restore(self, finding: Finding) -> Path | str | None:
        """Restore one file; return where its bytes are from, None where there is no copy."""
        claim, path = finding.claim, finding.damage.path
        if path is not None and finding.content is not None:
            write_aside(path, finding.content)
            return "what is always there"
        if claim is None or path is None or not path.is_relative_to(claim.path):
            return None
        if finding.chunk is not None:
            return self._restore_chunk(claim, finding.chunk)
        if path == Slot(claim.path).record_path:
            return self._restore_record(claim)
        return _restore_metadata(path, claim)

    def _restore_chunk(self, claim: Claim, chunk: Chunk) -> Path | None:
        step = self._step_held_for(claim)
        if step is None or claim.version != step:
            return None  # the chunk may be right, and the record of another step
        for slot, _ in self._copies(claim, step):
            source = slot.path / chunk.path.relative_to(claim.path)
            if self._scanner.problem(replace(chunk, path=source)) is None:
                _copy(source, chunk.path, self._io)
                return source if self._scanner.problem(chunk) is None else None
        return None

    def _restore_record(self, claim: Claim) -> Path | None:
        """Take over a record that is true of every chunk of the slot whose own is damaged."""
        step, path = self._step_held_for(claim), Slot(claim.path).record_path
        for slot, record in self._copies(claim, step) if step is not None else ():
            content = slot.record_path.read_bytes()
            if _holds(path, content):
                continue
            chunks = _chunks(claim, record)
            if all(problem is None for _, _, problem in self._scanner.scan(chunks)):
                write_aside(path, content)
                return slot.record_path
        return None

    def _copies(self, claim: Claim, step: int) -> Iterator[tuple[Slot, SlotRecord]]:
        """Yield the other slots of a segment whose record is of that step, with the record."""
        for slot in (*(slot for slots in self._snapshots.values() for slot in slots), *self._live):
            try:
                record = SlotRecord.read(slot.record_path)
            except DamagedStoreError:
                continue
            if slot.id != claim.path.name and (record.segment, record.version) == (
                claim.segment,
                step,
            ):
                yield slot, record

    def _step_held_for(self, claim: Claim) -> int | None:
        """Return the step that a slot has to be of; None where nothing but its record says it.

        That is the step of the snapshot that holds it, or that of all the other live slots.
        """
        slot = Slot(self._paths.slot(claim.path.name))
        held = {step for step, slots in self._snapshots.items() if slot in slots}
        if not held and slot in self._live:
            for other in self._live:
                with suppress(DamagedStoreError):
                    if other != slot:
                        held.add(int(read_record(other.record_path)["version"]))
        return held.pop() if len(held) == 1 else None


def _chunks(claim: Claim, record: SlotRecord) -> Iterator[tuple[None, Chunk]]:
    """Yield the chunks of a slot as another slot's record says that they are."""
    for name, sums in record.checksums.items():
        for n, checksum in enumerate(sums):
            where = Where(claim.segment, name, n)
            yield None, Chunk(where, claim.path / name / "c" / str(n), checksum, None)


def _restore_metadata(path: Path, claim: Claim) -> Path | None:
    """Take over an array's zarr.json from any slot, free ones too: it is known by its checksum."""
    if not isinstance(claim.record, SlotRecord):
        return None
    expected = claim.record.metadata.get(path.parent.name)
    for source in sorted(claim.path.parent.glob(f"*/{path.parent.name}/{ZARR_JSON}")):
        try:
            content = source.read_bytes()
        except OSError:
            continue
        if xxhash.xxh3_64_intdigest(content) == expected and not _holds(path, content):
            path.parent.mkdir(exist_ok=True)
            write_aside(path, content)
            return source
    return None


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file has these bytes already: what they say is wrong, so they restore nothing."""
    with suppress(OSError):
        return path.read_bytes() == content
    return False


def _copy(source: Path, target: Path, io: DirectIO) -> None:
    """Overwrite a file, or make it, with the bytes of another, durably; raises RunError."""
    size = source.stat().st_size
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and target.stat().st_size > size:
            os.truncate(target, size)
    except OSError as error:
        raise run_error(error, target, "write", size) from error
    allocate(target, size)
    flush_directory(target.parent)
    buffer = io_buffer(PIECE_BYTES)
    for offset in range(0, size, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, size - offset)]
        io.read(source, piece, offset=offset).result()
        io.write(target, piece, offset=offset, flush=False, checksum=False).result()
    io.flush(target).result()
