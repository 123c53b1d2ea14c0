"""Arrays: preallocated chunk files, written directly, that zarr and tensorstore read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.bfloat16 import numpy_dtype, register
from swaptrain.store.slots.array_files import ArrayFiles
from tests.store.helpers import aligned


def _random(dtype: str, nbytes: int) -> np.ndarray:
    count = nbytes // numpy_dtype(dtype).itemsize
    values = np.random.default_rng(0).integers(0, 2, count)
    return values.astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int64", "bool", "uint8"])
@pytest.mark.parametrize("rows", [None, 3])
def test_other_readers_see_what_was_written(tmp_path: Path, dtype: str, rows: int | None) -> None:
    """zarr-python and tensorstore read each row as it was written by direct I/O."""
    register()
    path = tmp_path / "values"
    path.mkdir()
    array = ArrayFiles(path, dtype, 4096, 2, rows)
    array.create()
    buffer, back = aligned(array.row_bytes), aligned(array.row_bytes)
    content = _random(dtype, array.row_bytes)
    buffer[:] = content.tobytes()
    row = None if rows is None else 1
    with DirectIO() as io:
        checksums = [f.result() for f in array.write(io, buffer, row=row, flush=True)]
        for future in array.read(io, back, row=row, checksums=checksums):
            future.result()
    assert back == buffer
    selection = ... if row is None else row
    seen = zarr.open_array(path, mode="r")
    np.testing.assert_array_equal(np.asarray(seen[selection]), content)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    other = tensorstore.open(spec, read=True).result()
    assert other.dtype.name == dtype
    np.testing.assert_array_equal(np.asarray(other[selection].read().result()), content)
    again = ArrayFiles.open(path)
    assert (again.dtype, again.chunk_bytes, again.chunks, again.rows) == (dtype, 4096, 2, rows)


def test_creating_again_keeps_what_is_there(tmp_path: Path) -> None:
    """A second creation, after a crash, neither clears a chunk nor touches the metadata."""
    array = ArrayFiles(tmp_path, "float32", 4096, 2)
    array.create()
    buffer = aligned(array.nbytes)
    buffer[:] = b"x" * array.nbytes
    with DirectIO() as io:
        for future in array.write(io, buffer, flush=True):
            future.result()
    array.files()[1].unlink()
    (tmp_path / "zarr.json").unlink()
    array.create()
    assert array.files()[0].read_bytes() == b"x" * 4096
    assert array.files()[1].read_bytes() == bytes(4096)
    assert ArrayFiles.open(tmp_path).chunks == 2
    with pytest.raises(RunError, match="another size"):
        ArrayFiles(tmp_path, "float32", 2048, 2).create()


def test_wrong_buffers_and_rows_are_refused(tmp_path: Path) -> None:
    """A buffer of another size, or a row where there are none, is the caller's mistake."""
    array = ArrayFiles(tmp_path, "float32", 4096, 2)
    with DirectIO() as io:
        with pytest.raises(ValueError, match="8192 bytes"):
            array.read(io, aligned(4096))
        with pytest.raises(ValueError, match="without a row"):
            array.read(io, aligned(8192), row=0)


def test_unreadable_metadata_is_damage(tmp_path: Path) -> None:
    """A missing or torn zarr.json names the array."""
    with pytest.raises(DamagedStoreError, match="metadata"):
        ArrayFiles.open(tmp_path)
    (tmp_path / "zarr.json").write_text('{"data_type": "float')
    with pytest.raises(DamagedStoreError, match="metadata"):
        ArrayFiles.open(tmp_path)
