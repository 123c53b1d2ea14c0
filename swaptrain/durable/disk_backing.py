"""The disk side of the RAM tier: which file holds the current version of each object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal

from swaptrain.durable.spill_files import SpillFiles
from swaptrain.memory.slab import Slab
from swaptrain.program.evaluation import is_evaluated
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.program.rows import row_turn
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.array_files import ArrayFiles, Place
from swaptrain.store.slots.commit import Write
from swaptrain.store.slots.slot import Slot

__all__ = ["DiskBacking"]


class DiskBacking:
    """Implements `memory.backing.Backing` over a run directory.

    State is read from the slot that holds its newest version, live or being committed. Values,
    gradients, accumulators and buffers between two commits are in `files`, outside the zarr root.
    A gradient has two rows per micro-batch, in turn by the commits between its readers, so that a
    hand-off never overwrites the one before it.
    """

    def __init__(
        self,
        run_dir: Path,
        layouts: Layouts,
        io: DirectIO,
        *,
        micro_batches: int,
        deferred: bool = False,
        verify: Literal["always", "first_read", "never"] = "first_read",
    ) -> None:
        self.files = SpillFiles(run_dir, layouts, micro_batches=micro_batches, deferred=deferred)
        self._paths = RunPaths(run_dir)
        self._layouts, self._io = layouts, io
        self._micro_batches = micro_batches
        self._verify = verify
        self.slots: dict[int, Slot] = {}
        """By segment: the slot with the newest version of its state."""
        self.unverified: dict[Place, Sequence[int] | Sequence[Future[int]]] = {}
        """Checksums that are compared at the next read: of what this process has neither written
        nor read yet, or, to verify always, of all that the disk holds."""
        self._committing: dict[ObjectKey, Slot] = {}
        """Parts of arrays that an update which is under way has changed: the slot that has them."""
        self.scratch: dict[int, Slot] = {}
        """By segment, with commit_every > 1: its slot in the tree that is not live."""
        self.barrier: Callable[[], None] = lambda: None
        """Waits until every commit submitted so far is durable."""
        self._spilled: set[ObjectKey] = set()
        self._kept: set[ObjectKey] = set()
        """Buffers whose newest version is what was kept with the finished gradient."""
        self._awaited: set[ObjectKey] = set()
        """Finished gradients that recovery needs until the commit of their update is durable."""
        self._in_flight: dict[Place, Sequence[Future[int]]] = {}
        self._spill_sums: dict[ObjectKey, Sequence[Future[int]]] = {}

    def size_bytes(self, key: ObjectKey) -> int:
        return self._layouts.size_bytes(key)

    def holds(self, key: ObjectKey) -> bool:
        return key.kind is Kind.STATE or key in self._spilled or key in self._kept

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        files, row = self.place(key)
        checksums = self._expected(files, row)
        return files.read(
            self._io, slab.memory, row=row, checksums=checksums, segment=key.segment or None
        )

    def _expected(self, files: ArrayFiles, row: int | None) -> Sequence[int] | None:
        """Return the checksums to compare a read with; what is read has been written to its end."""
        if self._verify == "never":
            return None
        if self._verify == "first_read":
            found = self.unverified.pop(files.place(row), None)
        else:
            found = self.unverified.get(files.place(row))
        if found is None:
            return None
        return [sum if isinstance(sum, int) else sum.result() for sum in found]

    def note_checksums(self, written: Place, checksums: Sequence[int]) -> None:
        """Take note of the checksums of what a commit wrote; on the committer's thread."""
        if self._verify == "always":
            self.unverified[written] = list(checksums)

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        files, row = self._spill_place(key)
        self._claim(files, row)
        if key in self._awaited:
            # The update of the step before has it, but its commit may not be durable yet.
            self.barrier()
            self._awaited.discard(key)
        if key.kind is Kind.GRADIENT:
            # It overwrites the gradient of two readers before, which the hand-off of the last
            # durable commit may name; and the next commit takes it as it is on the disk.
            self.barrier()
            futures = files.write(self._io, slab.memory, row=row, flush=True)
            self._spill_sums[key] = futures
        else:
            # What autograd saved is large, and gone with the process: no checksum, unless asked.
            checksum = key.kind is not Kind.SAVED or self._verify == "always"
            futures = files.write(self._io, slab.memory, row=row, flush=False, checksum=checksum)
        self._in_flight[files.place(row)] = futures
        if self._verify == "always":
            self.unverified[files.place(row)] = futures
        self._spilled.add(key)
        self._kept.discard(key)
        return futures

    def _claim(self, files: ArrayFiles, row: int | None) -> None:
        """Make a place free for other content: a write of what lay there may be under way."""
        wait(self._in_flight.pop(files.place(row), ()))
        self.unverified.pop(files.place(row), None)

    def spill_checksums(self, key: ObjectKey) -> Sequence[Future[int]]:
        """Return the checksums of a gradient that was spilled, flushed; none if it was not."""
        return self._spill_sums.get(key, ())

    def forget(self, key: ObjectKey) -> None:
        self._spilled.discard(key)
        self._kept.discard(key)
        self._spill_sums.pop(key, None)

    def wrote(self, key: ObjectKey) -> None:
        """Take note that the disk holds the object: a commit wrote it, or a resume found it."""
        self._spilled.add(key)
        self._kept.discard(key)

    def committed(self, segment: int, slot: Slot) -> None:
        """Take note that a commit writes the segment's state into `slot`, whole."""
        self.slots[segment] = slot
        for name in slot.arrays:
            for key in self._layouts.state_keys(segment, name):
                self._committing.pop(key, None)
                self._spilled.discard(key)
                self._kept.discard(key)
                if self._verify != "always":  # else the commit may have noted its own by now
                    self.unverified.pop(self.in_slot(key, slot).place(None), None)

    def committing(self, key: ObjectKey, slot: Slot, futures: Sequence[Future[int]]) -> None:
        """Take note that a part of a segment's state is written into `slot`, ahead of the rest."""
        self._committing[key] = slot
        place = self.in_slot(key, slot).place(None)
        if self._verify == "always":
            self.unverified[place] = futures
        else:
            self.unverified.pop(place, None)

    def in_slot(self, key: ObjectKey, slot: Slot) -> ArrayFiles:
        """Return where an array of a segment's state, or a part of one, lies in a slot."""
        files = slot.array(key.name)
        return files if key.part < 0 else files.part(*self._layouts.chunks_of(key))

    def switched(self) -> None:
        """Take note that the tree that state was spilled to is the live one now."""
        self._spilled = {key for key in self._spilled if key.kind is not Kind.STATE}

    def handoff_write(self, key: ObjectKey, slab: Slab) -> Write:
        """Return the write that puts an object in its own place for good."""
        files, row = self._spill_place(key)
        self._claim(files, row)
        return Write(files, slab.memory, row)

    def value_write(self, key: ObjectKey, slab: Slab) -> tuple[Write, int]:
        """Return the write that keeps a value or buffers, and its place in the journal."""
        files, row = self._spill_place(key)
        place = self.journal_place(key)
        assert place is not None
        self._claim(files, row)
        return Write(files, slab.memory, row), place

    def journal_place(self, key: ObjectKey) -> int | None:
        """Return where the journal says what the disk holds of a value or of buffers."""
        files, row = self._spill_place(key)
        if key.kind is Kind.VALUE:
            return self.files.place("values", files.name, row)
        return self.files.place("buffers", f"{key.segment:03d}/{key.name}", None)

    def writing(self, write: Write, future: Future[Any]) -> None:
        """Take note that a write of a place is under way, which the next one has to wait for."""
        self._in_flight[write.array.place(write.row)] = (future,)

    def keep_write(self, key: ObjectKey, slab: Slab) -> Write:
        """Return the write that keeps a segment's finished gradient, or its buffers."""
        files = self.kept_place(key)
        self._claim(files, None)
        return Write(files, slab.memory)

    def kept(self, key: ObjectKey) -> None:
        """Take note that the newest version of an object is the one that is kept."""
        if key.kind is Kind.ACCUMULATOR:
            self.wrote(key)
            self._awaited.add(key)
        else:
            self._kept.add(key)

    def kept_record(self, segment: int) -> Path:
        """Return the path of the record of a segment's finished gradient, beside its slot."""
        return self.files.record(segment)

    def kept_place(self, key: ObjectKey) -> ArrayFiles:
        """Return where the finished gradient of a segment, or its buffers, are kept."""
        if key.kind is Kind.ACCUMULATOR:
            return self.files.of("accumulators", f"{key.segment:03d}")
        files = self.files.all("kept", f"{key.segment:03d}")
        return next(f for f in files if f.name == key.name)

    def saved_place(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        """Return where an object lies when it is spilled or handed on, known to be there or not."""
        return self._spill_place(key)

    def place(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        """Return the files, and the row in them, with the current version of an object."""
        if key in self._kept:
            return self.kept_place(key), None
        if key.kind is Kind.STATE and key not in self._spilled:
            if key.name.startswith("frozen"):
                path = self._paths.frozen_slot(key.segment) / key.name
                return ArrayFiles.of_layout(path, self._layouts.array(key)), None
            return self.in_slot(key, self._committing.get(key, self.slots[key.segment])), None
        return self._spill_place(key)

    def _spill_place(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        if key.kind is Kind.VALUE:
            name = key.name
            if name.startswith("before."):
                name = f"{name}.{key.segment}"
            if is_evaluated(name):
                # No more batches than a step has micro-batches pass the slices together.
                rows = min(self._micro_batches, self._layouts.evaluated_batches)
                return self.files.of("evaluated", name), key.micro_batch % rows
            return self.files.of("values", name), key.micro_batch
        if key.kind is Kind.GRADIENT:
            row = row_turn(self._layouts.model, key) * self._micro_batches + key.micro_batch
            return self.files.of("gradients", key.name), row
        if key.kind is Kind.SAVED:
            return self.files.of("saved", f"{key.segment:03d}"), key.micro_batch
        if key.kind is Kind.ACCUMULATOR:
            return self.files.of("accumulators", f"{key.segment:03d}"), None
        if key.segment in self.scratch:
            return self.in_slot(key, self.scratch[key.segment]), None
        files = next(
            f for f in self.files.all("buffers", f"{key.segment:03d}") if f.name == key.name
        )
        return files, None

    def has_gradient(self, key: ObjectKey) -> bool:
        """Whether there is a place for a gradient that a record names."""
        try:
            row_turn(self._layouts.model, key)
        except ValueError:  # its segment does not read it
            return False
        return key.micro_batch < self._micro_batches

    def kept_arrays(self, segment: int) -> dict[str, int]:
        """Return what is kept of a segment: the chunks of each array, by name."""
        arrays = {
            array.name: array.chunks
            for array in self._layouts.state[segment].arrays
            if array.name.startswith("buffers_")
        }
        if segment in self._layouts.accumulators:
            arrays["gradient"] = self._layouts.accumulators[segment].chunks
        return arrays
