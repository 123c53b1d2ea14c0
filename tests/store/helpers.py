"""Aligned buffers, small layouts and committed stores for the tests of the store."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from swaptrain.program.tensors import TensorSpec
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.layout import ArrayLayout, SegmentLayout, lay_out
from swaptrain.store.format.record import record_size
from swaptrain.store.format.root import FORMAT, RootRecord, create_root
from swaptrain.store.format.state_record import blank_checksums, state_record
from swaptrain.store.slots.commit import Checksums, Committer, Write
from swaptrain.store.slots.slots import Slots


def aligned(nbytes: int) -> memoryview:
    """Return zeroed memory that starts at a page."""
    return memoryview(mmap.mmap(-1, nbytes))


def spec(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
    """Return a row-major tensor."""
    stride = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return TensorSpec(name, shape, stride, dtype)


def array(name: str, tensors: list[TensorSpec], *, chunk_bytes: int = 8192) -> ArrayLayout:
    """Return a layout of small chunks."""
    return lay_out(name, tensors[0].dtype, tensors, chunk_limit_bytes=chunk_bytes)


def small_root(
    segments: int = 1, *, choices: dict[str, Any] | None = None, **fields: Any
) -> RootRecord:
    """Return a root's record that says what every root says, and these choices and fields."""
    row = {"module": "layers", "isomorphism": 0, "parameters": [], "state": True, "frozen": False}
    usual = {
        "cuts": [],
        "chunk": 8192,
        "threads": 1,
        "dtype": "float32",
        "torch": "2.9",
        "update_device": "cpu",
    }
    found = {
        "fingerprint": "test",
        "segments": [{"segment": k, **row} for k in range(1, segments + 1)],
        "commit_every": 1,
        "choices": {**usual, **(choices or {})},
        "step": 0,
        "format": FORMAT,
        **fields,
    }
    return RootRecord.checked(found, Path("zarr.json"))


class SmallStore:
    """A run directory with slots for one shape class, and a way to commit arrays into it."""

    def __init__(self, run_dir: Path, layouts: list[SegmentLayout], *, free_slots: int = 1) -> None:
        self.run_dir, self.layouts = run_dir, layouts
        self.io = DirectIO()
        self.slots = Slots(run_dir)
        self.record_bytes = max(
            record_size(self.record(k, 0, blank_checksums(layout)))
            for k, layout in enumerate(layouts, 1)
        )
        for shape_class in {layout.shape_class for layout in layouts}:
            of_class = [layout for layout in layouts if layout.shape_class == shape_class]
            self.slots.create(
                of_class[0], len(of_class) + free_slots, record_bytes=self.record_bytes
            )
        self.committer = Committer(self.io, self.slots)

    def record(self, k: int, version: int, checksums: dict[str, list[int]]) -> dict[str, object]:
        return state_record(
            segment=k,
            version=version,
            fingerprint="test",
            layout=self.layouts[k - 1],
            checksums=checksums,
        )

    def commit(self, k: int, version: int, contents: dict[str, dict[str, np.ndarray]]) -> None:
        """Commit segment k: contents by array, then by tensor, in storage order."""
        layout = self.layouts[k - 1]
        writes = []
        slot = self.committer.take(layout.shape_class)
        for part in layout.arrays:
            buffer = aligned(part.nbytes)
            for entry in part.entries:
                value = contents[part.name][entry.tensor.name].reshape(-1)
                start = entry.offset * entry.tensor.itemsize
                buffer[start : start + value.nbytes] = value.tobytes()
            writes.append(Write(slot.array(part.name), buffer))

        def record(checksums: Checksums) -> dict[str, object]:
            return self.record(k, version, checksums.arrays)

        self.committer.commit(k, slot, record, self.committer.begin(writes)).result()

    def finish(self) -> None:
        """Write the root and close."""
        create_root(self.run_dir, small_root(len(self.layouts)))
        self.close()

    def close(self) -> None:
        self.committer.close()
        self.io.close()
