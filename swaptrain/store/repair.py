"""Restores damaged files from slots that hold the same bytes: those of snapshots, and the live."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.buffers import io_buffer
from swaptrain.store.direct import DirectIO
from swaptrain.store.files import allocate, flush_directory, run_error, write_aside
from swaptrain.store.findings import Finding
from swaptrain.store.record import decode_record, read_record
from swaptrain.store.root import segments_directory
from swaptrain.store.scan import Chunk, Scanner
from swaptrain.store.slot import Slot
from swaptrain.store.snapshots import list_snapshots
from swaptrain.store.units import Unit

__all__ = ["Repair", "repair"]

PIECE_BYTES = 4 * 2**20


@dataclass
class Repair:
    """What was done, a line per finding."""

    restored: list[str] = field(default_factory=list)
    without_copy: list[str] = field(default_factory=list)


def repair(run_dir: Path, findings: Sequence[Finding], io: DirectIO) -> Repair:
    """Restore what another slot of the same segment and version has; the run's lock is held.

    A file is believed by its own checksum, never by its place: a chunk by the one in the record of
    the damaged slot, a record by the chunks that lie beside it. Written in place, flushed, and
    read again. Raises RunError.
    """
    run_dir = run_dir.absolute()
    done = Repair()
    copies = list(_slots(run_dir))
    with Scanner(io) as scanner:
        # Records first: they say what the chunks of their slot have to be.
        for finding in sorted(findings, key=lambda f: f.damage.path != _record_of(f)):
            source = _restore(finding, copies, io, scanner)
            if source is None:
                done.without_copy.append(f"no other copy: {finding}")
            else:
                done.restored.append(f"restored {finding.damage.path} from {source}")
    return done


def _slots(run_dir: Path) -> Iterator[Slot]:
    """Yield the slots that may hold a copy: of snapshots, newest first, and the live ones."""
    for snapshot in reversed(list_snapshots(run_dir)):
        try:
            yield from snapshot.slots.values()
        except DamagedStoreError:
            continue
    for link in sorted(segments_directory(run_dir).glob("*")):
        if link.is_symlink():
            yield Slot(run_dir / "slots" / Path(os.readlink(link)).name)


def _record_of(finding: Finding) -> Path | None:
    return finding.unit.path / "zarr.json" if finding.unit is not None else None


def _restore(
    finding: Finding, copies: Sequence[Slot], io: DirectIO, scanner: Scanner
) -> Path | str | None:
    """Restore one file; return the one that it was taken from, None where there is none."""
    unit, path = finding.unit, finding.damage.path
    if path is not None and finding.content is not None:
        write_aside(path, finding.content)
        return "what is always there"
    if unit is None or path is None or not path.is_relative_to(unit.path):
        return None
    others = [slot for slot in copies if slot.path.resolve() != unit.path.resolve()]
    if path == _record_of(finding):
        return _restore_record(finding, others, scanner)
    if unit.record is None:
        return None
    if finding.chunk is None:
        return _restore_metadata(path, unit)
    for slot in others:
        try:
            record = read_record(slot.record_path)
        except DamagedStoreError:
            continue
        if (record["segment"], record["version"]) != (unit.segment, unit.record["version"]):
            continue
        chunk, source = finding.chunk, slot.path / path.relative_to(unit.path)
        good = Chunk(chunk.where, source, chunk.checksum, chunk.size_bytes)
        if scanner.problem(good) is None:
            _copy(source, path, io)
            return source if scanner.problem(chunk) is None else None
    return None


def _restore_metadata(path: Path, unit: Unit) -> Path | None:
    """Take over an array's zarr.json from any slot, spares too: it is known by its checksum."""
    expected = (unit.record or {}).get("metadata", {}).get(path.parent.name)
    for source in sorted(unit.path.parent.glob(f"*/{path.parent.name}/zarr.json")):
        try:
            content = source.read_bytes()
        except OSError:
            continue
        if xxhash.xxh3_64_intdigest(content) == expected:
            path.parent.mkdir(exist_ok=True)
            write_aside(path, content)
            return source
    return None


def _restore_record(finding: Finding, others: Sequence[Slot], scanner: Scanner) -> Path | None:
    """Take over the record of another slot if it is true of every chunk of the damaged one."""
    unit, path = finding.unit, finding.damage.path
    assert unit is not None and path is not None
    found: dict[int, tuple[bytes, Path]] = {}
    for slot in others:
        try:
            content = slot.record_path.read_bytes()
            record = decode_record(content, slot.record_path)
        except (OSError, DamagedStoreError):
            continue
        if record["segment"] != unit.segment:
            continue
        chunks = [
            Chunk(
                Where(unit.segment, name, number),
                unit.path / name / "c" / str(number),
                checksum,
                None,
            )
            for name, sums in record["checksums"].items()
            for folder in (unit.path / name / "c",)
            for number, checksum in enumerate(sums)
        ]
        if all(problem is None for _, _, problem in scanner.scan((0, c) for c in chunks)):
            found[record["version"]] = content, slot.record_path
    if len(found) != 1:
        return None  # none, or the same bytes after two steps: nothing says which step it is
    ((content, source),) = found.values()
    write_aside(path, content)
    return source


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
