"""The place that each kind of object has on the disk outside the slots."""

from __future__ import annotations

from pathlib import Path

from swaptrain.durable.spill_files import SpillFiles
from swaptrain.program.double_buffer import buffer_index
from swaptrain.program.instructions import Kind, ObjectKey, Of
from swaptrain.program.roles import Role
from swaptrain.store.format.object_layouts import Layouts, value_file
from swaptrain.store.paths import RunPaths, SpillFolder, segment_name
from swaptrain.store.slots.array_files import ArrayFiles

__all__ = ["ObjectPlaces"]


class ObjectPlaces:
    """Maps objects to files and rows; it knows nothing of what lies there.

    The file of a gradient has two buffers with a row per micro-batch. Readers on either side of a
    commit use different buffers, so that a hand-off never overwrites the one before it.
    """

    def __init__(
        self, run_dir: Path, layouts: Layouts, files: SpillFiles, *, micro_batches: int
    ) -> None:
        self._paths = RunPaths(run_dir)
        self._layouts, self._files = layouts, files
        self._micro_batches = micro_batches

    def spilled(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        """Return the files in RUN/spill, and the row in them, of an object."""
        if key.kind is Kind.VALUE:
            return self._value(key)
        if key.kind is Kind.GRADIENT:
            row = buffer_index(self._layouts.model, key) * self._micro_batches + key.micro_batch
            return self._files.of("gradients", key.label), row
        if key.kind is Kind.SAVED:
            return self._files.of("saved", segment_name(key.segment)), key.micro_batch
        if key.kind is Kind.ACCUMULATOR:
            return self._files.of("accumulators", segment_name(key.segment)), None
        return self._array("buffers", key), None

    def _value(self, key: ObjectKey) -> tuple[ArrayFiles, int]:
        if key.of is Of.EVALUATION:
            # No more batches than a step has micro-batches pass the slices together.
            rows = min(self._micro_batches, self._layouts.evaluated_batches)
            return self._files.of("evaluated", key.name), key.micro_batch % rows
        return self._files.of("values", value_file(key)), key.micro_batch

    def _array(self, folder: SpillFolder, key: ObjectKey) -> ArrayFiles:
        files = self._files.all(folder, segment_name(key.segment))
        return next(f for f in files if f.name == key.name)

    def finished(self, key: ObjectKey) -> ArrayFiles:
        """Return the files of a segment's finished gradient, or of the buffers beside it."""
        if key.kind is Kind.ACCUMULATOR:
            return self._files.of("accumulators", segment_name(key.segment))
        return self._array("finished", key)

    def frozen(self, key: ObjectKey) -> ArrayFiles:
        """Return the files of parameters that never change."""
        path = self._paths.frozen_slot(key.segment) / key.name
        return ArrayFiles.of_layout(path, self._layouts.array(key))

    def in_journal(self, key: ObjectKey) -> int | None:
        """Return the place where the journal says what the disk has of a value or of buffers."""
        if key.kind is Kind.VALUE:
            files, row = self.spilled(key)
            return self._files.place("values", files.name, row)
        return self._files.place("buffers", f"{segment_name(key.segment)}/{key.name}", None)

    def has_gradient(self, key: ObjectKey) -> bool:
        """Whether there is a place for a gradient that a record names."""
        try:
            buffer_index(self._layouts.model, key)
        except ValueError:  # its segment does not read it
            return False
        return key.micro_batch < self._micro_batches

    def finished_arrays(self, segment: int) -> dict[str, int]:
        """Return the chunks of each array beside a finished gradient, by name."""
        arrays = {
            array.name: array.chunks
            for array in self._layouts.state[segment].arrays
            if array.role is Role.BUFFERS
        }
        if segment in self._layouts.accumulators:
            arrays["gradient"] = self._layouts.accumulators[segment].chunks
        return arrays
