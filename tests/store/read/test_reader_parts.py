"""Tensors that are read again and again: a chunk is compared once, then parts of it are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from swaptrain.errors import DamagedStoreError
from swaptrain.store.read.reader import ChunkReader

ELEMENTS = 2048
"""Of a chunk of 8 KiB."""


@dataclass
class Files:
    """An array of three chunks, as a reader sees it."""

    directory: Path
    name: str = "weights"
    dtype: str = "float32"
    chunk_bytes: int = 4 * ELEMENTS

    def files(self) -> list[Path]:
        return [self.directory / str(number) for number in range(3)]


@pytest.fixture
def array(tmp_path: Path) -> Files:
    found = Files(tmp_path)
    for number, file in enumerate(found.files()):
        (np.arange(ELEMENTS, dtype=np.float32) + number * ELEMENTS).tofile(file)
    return found


def reader_of(array: Files, verified: set[int] | None) -> ChunkReader:
    sums = [xxhash.xxh3_64_intdigest(file.read_bytes()) for file in array.files()]
    seen: Any = array  # what a reader asks of a slot's array
    return ChunkReader(seen, sums, segment=1, verified=verified)


@pytest.mark.parametrize("again", [False, True])
def test_every_range_is_read(again: bool, array: Files) -> None:
    """Within a chunk, over their borders, and nothing at all; the first time and later."""
    reader = reader_of(array, set() if again else None)
    for _ in range(3):
        for start, count in ((0, 3 * ELEMENTS), (5, 7), (ELEMENTS - 1, 2), (2000, 3000), (9, 0)):
            assert reader.read(start, count).tolist() == list(range(start, start + count))


def test_damage_is_found_the_first_time_and_a_cut_always(array: Files) -> None:
    """Where a chunk has been compared, its length still is."""
    verified: set[int] = set()
    first, second, third = array.files()
    reader = reader_of(array, verified)
    reader.read(0, 2 * ELEMENTS)
    assert verified == {0, 1}
    third.write_bytes(bytes(4 * ELEMENTS))
    with pytest.raises(DamagedStoreError):
        reader.read(2 * ELEMENTS, 1)
    second.write_bytes(second.read_bytes()[:40])
    with pytest.raises(DamagedStoreError):
        reader_of(array, None).read(ELEMENTS + 9, 4)
    first.write_bytes(first.read_bytes()[:40])
    with pytest.raises(DamagedStoreError):
        reader.read(0, 4)  # nor is a page read that is beyond the end
