"""Restores damaged files from slots that hold the same bytes: those of snapshots, and the live."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.check.claims import Unit
from swaptrain.store.check.findings import Finding
from swaptrain.store.check.scan import Chunk, Scanner
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import allocate, flush_directory, run_error, write_aside
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.store.format.record import decode_record, read_record
from swaptrain.store.format.root import segments_directory
from swaptrain.store.format.schema import check_state
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

    A file is believed by its own checksum, never by its place: a chunk by the one in the record of
    the damaged slot, a record by the chunks that lie beside it. Where the two agree in nothing, the
    record is believed if it is of the step that the slot is held for. Written in place, flushed,
    and read again. Raises RunError.
    """
    run_dir = run_dir.absolute()
    done = Repair()
    copies = list(_slots(run_dir))
    with Scanner(io) as scanner:
        # Before any is written: of two records that were exchanged each is where the other belongs.
        records = [_true_record(finding, copies, scanner) for finding in findings]
        # Records first: they say what the chunks of their slot have to be.
        for record, finding in sorted(
            zip(records, findings, strict=True), key=lambda of: not of[0]
        ):
            restored = _restore(run_dir, finding, record, copies, io, scanner)
            if restored is None:
                done.without_copy.append(f"no other copy: {finding}")
            else:
                done.restored.append(f"restored {restored}")
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


def _restore(
    run_dir: Path,
    finding: Finding,
    record: tuple[bytes, Path] | None,
    copies: Sequence[Slot],
    io: DirectIO,
    scanner: Scanner,
) -> str | None:
    """Restore one file; return in words which, and from where, None where there is no copy.

    `record` is the one that is true of the slot, with its file, where a record is what is wrong.
    """
    unit, path = finding.unit, finding.damage.path
    if path is not None and finding.content is not None:
        write_aside(path, finding.content)
        return f"{path} from what is always there"
    if unit is None or path is None or not path.is_relative_to(unit.path):
        return None
    if record is not None:
        content, source = record
        write_aside(path, content)
        return f"{path} from {source}"
    if unit.record is None:
        return None
    if not finding.chunks:
        metadata = _restore_metadata(path, unit)
        return None if metadata is None else f"{path} from {metadata}"
    everything = len(finding.chunks) == len(unit.chunks)
    if everything and _held_for(run_dir, unit) not in (set(), {unit.version}):
        return None  # the chunks may be right, and the record another step's
    others = [slot for slot in copies if slot.path.resolve() != unit.path.resolve()]
    found = [_source(chunk, unit, others, scanner) for chunk in finding.chunks]
    sources = [source for source in found if source is not None]
    if len(sources) < len(found):
        return None
    for chunk, chunk_source in zip(finding.chunks, sources, strict=True):
        _copy(chunk_source, chunk.path, io)
        if scanner.problem(chunk) is not None:
            return None
    files = ", ".join(str(chunk.path) for chunk in finding.chunks)
    return f"{files} from {', '.join(map(str, sources))}"


def _held_for(run_dir: Path, unit: Unit) -> set[int]:
    """Return the steps that a slot may be held for, by its snapshots and the other live slots."""
    slot, held = unit.path.resolve(), set[int]()
    for snapshot in list_snapshots(run_dir):
        with suppress(DamagedStoreError):
            if any(other.path.resolve() == slot for other in snapshot.slots.values()):
                held.add(snapshot.step)
    live = [link for link in segments_directory(run_dir).glob("*") if link.is_symlink()]
    if any(link.resolve() == slot for link in live):
        for link in live:
            with suppress(DamagedStoreError):
                if link.resolve() != slot:
                    held.add(int(read_record(link / "zarr.json")["version"]))
    return held


def _source(chunk: Chunk, unit: Unit, others: Sequence[Slot], scanner: Scanner) -> Path | None:
    """Return a chunk of a slot of the same segment and version, if its bytes are right."""
    assert unit.record is not None
    for slot in others:
        try:
            record = read_record(slot.record_path)
        except DamagedStoreError:
            continue
        if (record["segment"], record["version"]) != (unit.segment, unit.record["version"]):
            continue
        source = slot.path / chunk.path.relative_to(unit.path)
        if scanner.problem(replace(chunk, path=source)) is None:
            return source
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


def _true_record(
    finding: Finding, copies: Sequence[Slot], scanner: Scanner
) -> tuple[bytes, Path] | None:
    """Return the record of another slot that is true of all chunks of a damaged one, and its file.

    Of spares too where the slot's own is whole and true of nothing, since it was exchanged then.
    None where it is no record that is wrong, or none or two are true.
    """
    unit, path = finding.unit, finding.damage.path
    if unit is None or path != unit.path / "zarr.json":
        return None
    found: dict[int, tuple[bytes, Path]] = {}
    sources = [slot.record_path for slot in copies]
    if finding.chunks:
        sources = sorted(unit.path.parent.glob("*/zarr.json"))
    for source in sources:
        try:
            content = source.read_bytes()
            record = decode_record(content, source)
            check_state(record, source)
        except (OSError, DamagedStoreError):
            continue
        if source.resolve() == path.resolve() or record["segment"] != unit.segment:
            continue
        chunks = [
            Chunk(Where(unit.segment, name, n), unit.path / name / "c" / str(n), checksum, None)
            for name, sums in record["checksums"].items()
            for n, checksum in enumerate(sums)
        ]
        if all(problem is None for _, _, problem in scanner.scan((0, c) for c in chunks)):
            found[record["version"]] = content, source
    if len(found) != 1:
        return None  # none, or the same bytes after two steps: nothing says which step it is
    return next(iter(found.values()))


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
