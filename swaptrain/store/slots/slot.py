"""A slot: one committed copy of one segment's state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.disk.durable_files import (
    allocate_blank,
    disk_errors,
    flush_file_system,
    run_error,
)
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.record import write_record
from swaptrain.store.format.root import ensure_group, link_static
from swaptrain.store.format.state_record import SlotRecord
from swaptrain.store.paths import ZARR_JSON, RunPaths
from swaptrain.store.slots.array_files import ArrayFiles

__all__ = ["Slot", "create_frozen", "frozen_slot"]


@dataclass(frozen=True)
class Slot:
    """A directory with preallocated arrays and a record: one copy of one segment's state."""

    path: Path

    @property
    def id(self) -> str:
        """The slot's name, which is that of its directory."""
        return self.path.name

    @property
    def record_path(self) -> Path:
        """The group's zarr.json, the only metadata that a commit changes."""
        return self.path / ZARR_JSON

    @cached_property
    def arrays(self) -> dict[str, ArrayFiles]:
        """The arrays by name, as found on disk; raises DamagedStoreError."""
        return {
            file.parent.name: ArrayFiles.open(file.parent)
            for file in sorted(self.path.glob(f"*/{ZARR_JSON}"))
        }

    def array(self, name: str) -> ArrayFiles:
        """Return one array; raises DamagedStoreError when it is not there."""
        if name not in self.arrays:
            raise DamagedStoreError("an array is missing", array=name, path=self.path)
        return self.arrays[name]

    def read_record(self, segment: int, *, link: Path | None = None) -> SlotRecord:
        """Return what the record says; `link` is the name by which the slot is one of `segment`.

        Raises DamagedStoreError when it does not verify, is another segment's, or does not fit the
        arrays of the slot.
        """
        record = self.read_unfitted(segment, link=link)
        self.check_arrays(record)
        record.check_fit(self.arrays, self.record_path)
        return record

    def read_unfitted(self, segment: int, *, link: Path | None = None) -> SlotRecord:
        """Return the same without a look into the arrays, whose damage is told one by one then."""
        record = SlotRecord.read(self.record_path)
        if record.segment != segment:
            slot = "a segment's slot" if link is None else f"the slot that {link} leads to"
            text = f"{slot} is one of segment {record.segment}"
            raise DamagedStoreError(text, segment=segment, path=self.record_path)
        arrays = {path.parent.name for path in self.path.glob(f"*/{ZARR_JSON}")}
        if arrays and record.checksums and arrays.isdisjoint(record.checksums):
            text = "a record names none of the arrays beside it: it is another slot's"
            raise DamagedStoreError(text, segment=segment, path=self.record_path)
        return record

    def write_record(self, attributes: dict[str, Any]) -> None:
        """Overwrite the record in place and flush it; raises RunError.

        It also says what the metadata of the arrays is, which nothing but the record could verify.
        """
        attributes = {**attributes, "metadata": self.metadata}
        write_record(self.record_path, attributes, self.record_path.stat().st_size)

    @cached_property
    def metadata(self) -> dict[str, int]:
        """By array: the xxh3-64 of its zarr.json, which stays as it is once the slot exists."""
        return {
            name: xxhash.xxh3_64_intdigest((files.path / ZARR_JSON).read_bytes())
            for name, files in self.arrays.items()
        }

    def check_arrays(self, record: SlotRecord) -> None:
        """Compare the arrays that are there with the record; raises DamagedStoreError."""
        for damage in self.damaged_arrays(record):
            raise damage

    def check_files(self, record: SlotRecord) -> None:
        """Look at the sizes of the chunk files, not at their bytes; raises DamagedStoreError.

        What is missing or cut short is found before anything is computed, and also where a run
        writes to a file before it would have read it.
        """
        for name in record.checksums:
            for chunk, path in enumerate(self.array(name).files()):
                of = Where(record.segment, name, chunk)
                expected = self.array(name).chunk_bytes
                try:
                    found = path.stat().st_size
                except FileNotFoundError:
                    error = DamagedStoreError("a file of the store is missing", path=path)
                    raise error.within(of) from None
                except OSError as error:
                    raise run_error(error, path, "look at") from error
                if found < expected:
                    text = f"a file of the store has {found:,} bytes instead of {expected:,}"
                    raise DamagedStoreError(text, path=path).within(of)

    def damaged_arrays(self, record: SlotRecord) -> Iterator[DamagedStoreError]:
        """Yield what is wrong with the metadata of the arrays that the record names."""
        for name, checksums in record.checksums.items():
            of = Where(record.segment, name)
            path = self.path / name / ZARR_JSON
            expected = record.metadata.get(name)
            try:
                files = ArrayFiles.open(path.parent)
                content = path.read_bytes()
                if expected is not None and xxhash.xxh3_64_intdigest(content) != expected:
                    raise DamagedStoreError("an array's metadata does not verify", path=path)
                if files.chunks != len(checksums):
                    raise DamagedStoreError("an array has another size than its record", path=path)
            except DamagedStoreError as error:
                yield error.within(of)

    def create(self, layout: SegmentLayout, record_bytes: int, *, flush: bool = True) -> None:
        """Make the directory, its arrays and a blank record, durably if `flush`; keep what exists.

        Nothing is created, renamed or resized in the directory afterwards. What the records will
        say of the arrays is what was written here, not what a disk gives back that may err.
        """
        made = {a.name: ArrayFiles.of_layout(self.path / a.name, a) for a in layout.arrays}
        with disk_errors(self.path, "create", layout.nbytes):
            self.path.mkdir(parents=True, exist_ok=True)
            for files in made.values():
                files.create(flush=False)
            self.__dict__["arrays"] = made  # as their cached properties would
            self.__dict__["metadata"] = {
                name: xxhash.xxh3_64_intdigest(files.metadata()) for name, files in made.items()
            }
            allocate_blank(self.record_path, record_bytes)
        if flush:
            flush_file_system(self.path)


def frozen_slot(run_dir: Path, segment: int) -> Slot:
    """Return where a segment's frozen parameters are kept, if it has any."""
    return Slot(RunPaths(run_dir).frozen_slot(segment))


def create_frozen(run_dir: Path, segment: int, layout: SegmentLayout, *, record_bytes: int) -> Slot:
    """Make the place of a segment's frozen parameters: written once, with a record like a slot's.

    It appears in the hierarchy as `frozen/NNN`.
    """
    ensure_group(RunPaths(run_dir).frozen)
    slot = frozen_slot(run_dir, segment)
    slot.create(layout, record_bytes)
    link_static(run_dir, RunPaths(run_dir).frozen.name)
    return slot
