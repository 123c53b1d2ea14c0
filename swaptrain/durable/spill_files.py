"""The files beside the slots: what a step makes and the rest of it, or the next one, needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from swaptrain.program.roles import Role
from swaptrain.store.disk.durable_files import (
    allocate_blank,
    disk_errors,
    flush_file_system,
    make_directory,
)
from swaptrain.store.disk.journal import Journal
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.paths import RunPaths, SpillFolder, segment_name
from swaptrain.store.slots.array_files import ArrayFiles

__all__ = ["SpillFiles"]

_SHARED = "shared"


class SpillFiles:
    """`RUN/spill`: folders of arrays, the records of finished gradients, and the journal of values.

    `values/NAME`, `evaluated/NAME` (of evaluations), `saved/NNN` and `gradients/NAME` have rows (of
    micro-batches; gradients two sets of them), `accumulators/NNN` and `buffers/NNN` one copy of a
    segment's. When updates are deferred, `finished/NNN` has the record of the finished gradient
    in `accumulators/NNN`, and the buffers that belong to it.
    """

    def __init__(
        self, run_dir: Path, layouts: Layouts, *, micro_batches: int, deferred: bool
    ) -> None:
        self._paths = RunPaths(run_dir)
        self._layouts = layouts
        self._micro_batches = micro_batches
        self._deferred = deferred
        self._files: dict[tuple[SpillFolder, str], ArrayFiles] = {}
        buffers = [
            f"buffers/{segment_name(k)}/{array.name}"
            for k, state in layouts.state.items()
            for array in state.arrays
            if array.role is Role.BUFFERS
        ]
        rows = [f"{name}/{m}" for name in layouts.values for m in range(micro_batches)]
        self._places = {name: number for number, name in enumerate(rows + buffers)}
        self.journal = Journal(
            self._paths.journal, len(self._places), token=layouts.model.fingerprint
        )
        """What the rows of `values` and the arrays of `buffers` hold, as far as it is known."""

    def clear_saved(self) -> None:
        """Delete what autograd saved, and what evaluations made, in an earlier process."""
        for folder in (self._paths.spill_folder("saved"), self._paths.spill_folder("evaluated")):
            if folder.is_dir():
                with disk_errors(folder, "delete"):
                    shutil.rmtree(folder)

    def reserve_saved(self, saves: Collection[int]) -> None:
        """Reserve room for all that the segments save which save what their backward needs.

        It is scratch, so nothing is flushed. Raises RunError (disk full).
        """
        make_directory(self._paths.spill)
        for k in saves:
            self.of("saved", segment_name(k)).create(flush=False)

    def reserve_evaluated(self) -> None:
        """Reserve room for the values of an evaluation; scratch too. Raises RunError (disk full).

        At each start, since held-out data may come and go.
        """
        make_directory(self._paths.spill)
        for name in self._layouts.evaluated:
            self.of("evaluated", name).create(flush=False)

    def create(self, record_bytes: Callable[[int], int]) -> None:
        """Reserve the files, durably; what exists is kept.

        `record_bytes` gives the size of the record of a segment's finished gradient.
        """
        make_directory(self._paths.spill)
        for folder, name in self._names():
            for files in self.all(folder, name):
                files.create(flush=False)
        for k in self._layouts.state if self._deferred else ():
            path = self.record(k)
            make_directory(path.parent)
            allocate_blank(path, record_bytes(k))
        self.journal.create()
        flush_file_system(self._paths.spill)

    def create_journal(self) -> None:
        """Make the journal alone: of what is there nothing is believed, and nothing is spilled."""
        make_directory(self._paths.spill)
        self.journal.create()

    def saved_bytes(self, saves: Collection[int]) -> int:
        """Return what `reserve_saved` reserves."""
        return sum(files.nbytes for k in saves for files in self.all("saved", segment_name(k)))

    def disk_bytes(self) -> int:
        """Return what `create` reserves, but for the records and what autograd saves."""
        arrays = sum(
            files.nbytes for folder, name in self._names() for files in self.all(folder, name)
        )
        evaluated = (self.of("evaluated", name).nbytes for name in self._layouts.evaluated)
        return arrays + sum(evaluated) + self.journal.nbytes

    def place(self, folder: str, name: str, row: int | None) -> int | None:
        """Return the number of a place in the journal; None for what it does not cover."""
        return self._places.get(f"{name}/{row}" if folder == "values" else f"{folder}/{name}")

    def record(self, segment: int) -> Path:
        """Return the path of the record of a segment's finished gradient."""
        return self._paths.gradient_record(segment)

    def of(self, folder: SpillFolder, name: str) -> ArrayFiles:
        """Return the files of a folder's only array of that name."""
        if (folder, name) not in self._files:
            (self._files[folder, name],) = self.all(folder, name)
        return self._files[folder, name]

    def all(self, folder: SpillFolder, name: str) -> list[ArrayFiles]:
        """Return the files of every array of that name, or of that segment."""
        path = self._paths.spilled(folder, name)
        m = self._micro_batches
        if folder == "values":
            return [ArrayFiles.of_layout(path, self._layouts.values[name], m)]
        if folder == "evaluated":
            rows = min(m, self._layouts.evaluated_batches)
            return [ArrayFiles.of_layout(path, self._layouts.evaluated[name], rows)]
        if folder == "gradients":
            return [ArrayFiles.of_layout(path, self._layouts.gradients[name], 2 * m)]
        if folder == "saved":
            return [ArrayFiles.of_layout(path, self._layouts.saved[int(name)], m)]
        if name == _SHARED:
            every = list(self._layouts.accumulators.values())
            chunk_bytes = max(array.chunk_bytes for array in every)
            chunks = max(array.chunks for array in every)
            return [ArrayFiles(path / every[0].name, every[0].dtype, chunk_bytes, chunks)]
        k = int(name)
        if folder == "accumulators":
            if not self._deferred:
                # Sums live for one segment's backward only: there is one place for those of all
                # segments, for a pool so small that one has to leave.
                path = self._paths.spilled(folder, _SHARED)
            arrays = [self._layouts.accumulators[k]]
        else:
            state = self._layouts.state[k].arrays
            arrays = [array for array in state if array.role is Role.BUFFERS]
        return [ArrayFiles.of_layout(path / array.name, array) for array in arrays]

    def _names(self) -> Iterator[tuple[SpillFolder, str]]:
        yield from (("values", name) for name in self._layouts.values)
        yield from (("gradients", name) for name in self._layouts.gradients)
        if self._deferred:
            yield from (("accumulators", segment_name(k)) for k in self._layouts.accumulators)
        elif self._layouts.accumulators:
            yield "accumulators", _SHARED
        for k in self._layouts.state:
            yield "buffers", segment_name(k)
            if self._deferred:
                yield "finished", segment_name(k)
