"""The disk side of the RAM tier: which file holds the current version of each object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from swaptrain.execute.layouts import Layouts
from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.array import ArrayFiles
from swaptrain.store.commit import Write
from swaptrain.store.direct import DirectIO
from swaptrain.store.files import make_directory
from swaptrain.store.slots import Slot

__all__ = ["StoreHome"]


class StoreHome:
    """Implements `memory.tier.Home` over a run directory.

    State is read from the slot that holds its newest version, live or being committed. Values,
    gradients and accumulators are spilled outside the zarr root: `RUN/spill/values/NAME`,
    `RUN/spill/gradients/NAME` (two rows per micro-batch, in turn by reader, so that a hand-off
    never overwrites the one before it), `RUN/spill/accumulators/NNN`.
    """

    def __init__(
        self, run_dir: Path, layouts: Layouts, io: DirectIO, *, micro_batches: int
    ) -> None:
        self._spill = run_dir / "spill"
        self._static = run_dir / "static"
        self._layouts, self._io = layouts, io
        self._micro_batches = micro_batches
        self.slots: dict[int, Slot] = {}
        """By segment: the slot with the newest version of its state."""
        self.unverified: dict[tuple[Path, int | None], Sequence[int]] = {}
        """Checksums of what this process has neither written nor read yet, by files and row."""
        self.scratch: dict[int, Slot] = {}
        """By segment, with commit_every > 1: its slot in the tree that is not live."""
        self.barrier: Callable[[], None] = lambda: None
        """Waits until every commit submitted so far is durable."""
        self._spilled: set[ObjectKey] = set()
        self._spill_sums: dict[ObjectKey, Sequence[Future[int]]] = {}
        self._files: dict[tuple[str, str], ArrayFiles] = {}

    def create(self, allow: Callable[[str], bool] = lambda _: True) -> None:
        """Reserve the spill files, durably; what exists is kept."""
        for folder, names in (
            ("values", self._layouts.values),
            ("gradients", self._layouts.gradients),
            ("accumulators", {f"{k:03d}": 0 for k in self._layouts.accumulators}),
            ("buffers", {f"{k:03d}": 0 for k in self._layouts.state}),
        ):
            if not allow(folder):
                continue
            for name in names:
                for files in self._all_files(folder, name):
                    make_directory(files.path)
                    files.create()

    def disk_bytes(self) -> int:
        """Return what `create` reserves."""
        m = self._micro_batches
        return (
            sum(a.nbytes * m for a in self._layouts.values.values())
            + sum(a.nbytes * 2 * m for a in self._layouts.gradients.values())
            + sum(a.nbytes for a in self._layouts.accumulators.values())
            + sum(
                a.nbytes
                for s in self._layouts.state.values()
                for a in s.arrays
                if a.name.startswith("buffers_")
            )
        )

    def size_bytes(self, key: ObjectKey) -> int:
        return self._layouts.size_bytes(key)

    def holds(self, key: ObjectKey) -> bool:
        return key.kind is Kind.STATE or key in self._spilled

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        files, row = self.place(key)
        checksums = self.unverified.pop((files.path, row), None)
        return files.read(self._io, slab.memory, row=row, checksums=checksums)

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        files, row = self._spill_place(key)
        if key.kind is Kind.GRADIENT:
            # It overwrites the gradient of two readers before, which the hand-off of the last
            # durable commit may name; and the next commit takes it as it is on the disk.
            self.barrier()
            futures = files.write(self._io, slab.memory, row=row, flush=True)
            self._spill_sums[key] = futures
        else:
            futures = files.write(self._io, slab.memory, row=row, flush=False)
        self._spilled.add(key)
        return futures

    def spill_checksums(self, key: ObjectKey) -> Sequence[Future[int]]:
        """Return the checksums of a gradient that was spilled, flushed; none if it was not."""
        return self._spill_sums.get(key, ())

    def forget(self, key: ObjectKey) -> None:
        self._spilled.discard(key)
        self._spill_sums.pop(key, None)

    def wrote(self, key: ObjectKey) -> None:
        """Take note that the disk holds the object: a commit wrote it, or a resume found it."""
        self._spilled.add(key)

    def committed(self, segment: int, slot: Slot) -> None:
        """Take note that a commit writes the segment's state into `slot`, whole."""
        self.slots[segment] = slot
        for key in [k for k in self._spilled if k.kind is Kind.STATE and k.segment == segment]:
            self._spilled.discard(key)

    def switched(self) -> None:
        """Take note that the tree that state was spilled to is the live one now."""
        self._spilled = {key for key in self._spilled if key.kind is not Kind.STATE}

    def handoff_write(self, key: ObjectKey, slab: Slab) -> Write:
        """Return the write that puts an object in its own place for good."""
        files, row = self._spill_place(key)
        return Write(files, slab.memory, row)

    def accumulator_record(self, segment: int) -> Path:
        """Return the path of the record beside a segment's spilled gradient."""
        return self._spill / "accumulators" / f"{segment:03d}" / "record.json"

    def gradient_place(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        """Return where a gradient of a hand-off lies, whether or not it is known to be there."""
        return self._spill_place(key)

    def place(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        """Return the files, and the row in them, with the current version of an object."""
        if key.kind is Kind.STATE and key not in self._spilled:
            if key.name.startswith("frozen"):
                path = self._static / "frozen" / f"{key.segment:03d}" / key.name
                return ArrayFiles.of_layout(path, self._layouts.array(key)), None
            return self.slots[key.segment].array(key.name), None
        return self._spill_place(key)

    def _spill_place(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        if key.kind is Kind.VALUE:
            name = key.name
            if name.startswith("before."):
                name = f"{name}.{key.segment}"
            return self._of("values", name), key.micro_batch % self._micro_batches
        if key.kind is Kind.GRADIENT:
            turn = self._turn(key)
            return self._of("gradients", key.name), turn * self._micro_batches + key.micro_batch
        if key.kind is Kind.ACCUMULATOR:
            return self._of("accumulators", f"{key.segment:03d}"), None
        if key.segment in self.scratch:
            return self.scratch[key.segment].array(key.name), None
        files = next(
            f for f in self._all_files("buffers", f"{key.segment:03d}") if f.name == key.name
        )
        return files, None

    def _turn(self, key: ObjectKey) -> int:
        """Number the readers of a value from 0; neighbours use different rows."""
        model = self._layouts.model
        if key.name in model.values:
            readers: Sequence[int] = model.values[key.name].readers
        else:
            name = key.name.removeprefix("parameter.")
            readers = [s.index for s in model.segments if name in s.parameters]
        return readers.index(key.segment) % 2

    def _of(self, folder: str, name: str) -> ArrayFiles:
        if (folder, name) not in self._files:
            (self._files[folder, name],) = self._all_files(folder, name)
        return self._files[folder, name]

    def _all_files(self, folder: str, name: str) -> list[ArrayFiles]:
        path = self._spill / folder / name
        m = self._micro_batches
        if folder == "values":
            return [ArrayFiles.of_layout(path, self._layouts.values[name], m)]
        if folder == "gradients":
            return [ArrayFiles.of_layout(path, self._layouts.gradients[name], 2 * m)]
        if folder == "accumulators":
            array = self._layouts.accumulators[int(name)]
            return [ArrayFiles.of_layout(path / array.name, array)]
        return [
            ArrayFiles.of_layout(path / array.name, array)
            for array in self._layouts.state[int(name)].arrays
            if array.name.startswith("buffers_")
        ]
