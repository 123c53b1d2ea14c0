"""The checksums that the records of a run give: of one slot, or of files that a step needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.check.scan import Chunk
from swaptrain.store.format.state_record import SegmentRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.store.slots.slot import Slot, frozen_slot

__all__ = ["Claim", "frozen_claim", "live_claim", "slot_claim", "spilled_claim"]


@dataclass(frozen=True)
class Claim:
    """Chunks that one record names, and the damages that show without a look at them."""

    title: str
    """What it is beside a segment's live state: "frozen", "hand-off", "snapshot of step 9", ..."""
    segment: int
    path: Path
    """The slot, or the record's file."""
    stamp: object
    """Equal as long as the same record of the same slot names the same bytes."""
    record: SegmentRecord | None
    """None where it does not verify."""
    chunks: tuple[Chunk, ...]
    damages: tuple[DamagedStoreError, ...]
    again: Callable[[], Claim | None]
    """Looks once more: at what has the place now, None if nothing has."""

    @property
    def version(self) -> int | None:
        """The step after which the bytes are as they are."""
        return None if self.record is None else self.record.version

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks, as far as the metadata says them."""
        return sum(chunk.size_bytes or 0 for chunk in self.chunks)


def live_claim(
    run_dir: Path, segment: int, fingerprint: str | None, *, tree: str | None = None
) -> Claim:
    """Return the live state of a segment, in a tree or in the live one."""
    paths = RunPaths(run_dir)
    link = paths.live_link(segment, tree)

    def again() -> Claim:
        return live_claim(run_dir, segment, fingerprint, tree=tree)

    try:
        path = paths.slot(Path(os.readlink(link)).name)
    except OSError:
        damage = DamagedStoreError("a segment's live name is missing", segment=segment, path=link)
        return Claim("", segment, link, (link, None), None, (), (damage,), again)
    return slot_claim("", Slot(path), segment, fingerprint, again, link=link)


def frozen_claim(run_dir: Path, segment: int, fingerprint: str | None) -> Claim:
    """Return the frozen parameters of a segment."""
    slot = frozen_slot(run_dir, segment)
    return slot_claim(
        "frozen", slot, segment, fingerprint, lambda: frozen_claim(run_dir, segment, fingerprint)
    )


def slot_claim(
    title: str,
    slot: Slot,
    segment: int,
    fingerprint: str | None,
    again: Callable[[], Claim | None],
    *,
    link: Path | None = None,
) -> Claim:
    """Return what the record of a slot vouches for; by its name `link` it is of that segment."""
    path = slot.path

    def damaged(error: DamagedStoreError, stamp: object) -> Claim:
        found = error.within(Where(segment=segment))
        return Claim(title, segment, path, (path, stamp), None, (), (found,), again)

    if not path.is_dir():
        text = "a segment's slot is missing: is its disk there?"
        return damaged(DamagedStoreError(text, path=path), None)
    try:
        record = slot.read_unfitted(segment, link=link)
    except DamagedStoreError as error:
        return damaged(error, _digest(slot.record_path))
    if fingerprint is not None and record.fingerprint != fingerprint:
        text = "a slot belongs to another model"
        return damaged(DamagedStoreError(text, path=slot.record_path), record)
    damages = tuple(slot.damaged_arrays(record))
    wrong = {error.array for error in damages}
    chunks = tuple(
        chunk
        for name, sums in record.checksums.items()
        for chunk in _chunks(segment, path / name, sums, trusted=name not in wrong)
    )
    return Claim(title, segment, path, (path, record), record, chunks, damages, again)


def spilled_claim(
    title: str,
    segment: int,
    record_path: Path,
    record: SegmentRecord,
    arrays: Sequence[tuple[Path, int | None, Sequence[int]]],
    again: Callable[[], Claim | None],
) -> Claim:
    """Return what a record says of arrays, or rows of them, outside the slots."""
    chunks = tuple(
        chunk
        for path, row, sums in arrays
        # The metadata of what is spilled is written anew at every opening: nothing vouches for it.
        for chunk in _chunks(segment, path, sums, trusted=False, row=row)
    )
    return Claim(title, segment, record_path, record, record, chunks, (), again)


def _chunks(
    segment: int, path: Path, sums: Sequence[int], *, trusted: bool, row: int | None = None
) -> Iterator[Chunk]:
    """Yield the chunks of an array; without trust in its metadata their size is open."""
    size_bytes = None
    if trusted:
        try:
            size_bytes = ArrayFiles.open(path).chunk_bytes
        except DamagedStoreError:
            size_bytes = None  # a run that ends deletes free slots, as this slot may be one by now
    folder = path / "c" if row is None else path / "c" / str(row)
    for number, checksum in enumerate(sums):
        where = Where(segment, path.name, number)
        yield Chunk(where, folder / str(number), checksum, size_bytes)


def _digest(path: Path) -> int | None:
    """Return the xxh3-64 of a small file, None where it cannot be read."""
    try:
        return xxhash.xxh3_64_intdigest(path.read_bytes())
    except OSError:
        return None
