"""Token files: raw, NumPy and zarr."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from swaptrain.config.data import DataConfig
from swaptrain.data import open_data, open_example
from swaptrain.errors import ConfigError

Config = Callable[..., DataConfig]


def save_zarr(path: Path, ids: np.ndarray[Any, Any], **options: Any) -> None:
    array = zarr.create_array(store=path, shape=ids.shape, dtype=ids.dtype, **options)
    array[:] = ids


def test_files_are_joined_in_the_given_order(tmp_path: Path, data_config: Config) -> None:
    """A .bin, a .npy and a zarr array (compressed, sharded) read as one sequence of ids."""
    parts = [np.arange(start, start + 13, dtype=np.uint16) for start in (500, 0, 100, 200)]
    parts[0].tofile(tmp_path / "z.bin")
    np.save(tmp_path / "b.npy", parts[1].astype(np.int64))
    save_zarr(tmp_path / "a.zarr", parts[2], chunks=(4,))
    save_zarr(tmp_path / "s.zarr", parts[3], chunks=(2,), shards=(8,))
    names = [str(tmp_path / name) for name in ("z.bin", "b.npy", "a.zarr", "s.zarr")]
    config = data_config(tokens=names, sequence_length=5)
    batches = open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=513)
    joined = np.concatenate(parts)[:50]
    assert len(batches) == 10
    found = [batches.batch(step, 0)["input_ids"][0].tolist() for step in range(1, 11)]
    assert found == joined.reshape(10, 5).tolist()
    example = open_example(config, model_vocabulary=None)
    assert example["labels"].tolist() == found[:1]


@pytest.mark.parametrize("kind", ["bin", "npy", "text", "joined"])
def test_what_is_expected_is_read_by_the_kernel(
    kind: str, tmp_path: Path, data_config: Config
) -> None:
    """Tokens that were dropped from the page cache are in it again, and nobody has waited."""
    path = tmp_path / f"data.{kind}"
    count, begin, end = 2**19, 300_000, 302_000
    ids = np.arange(count) % 251
    if kind == "text":
        path.write_bytes(ids.astype(np.uint8).tobytes())
        config = data_config(text=[str(path)], text_as_is=True, sequence_length=end - begin)
    elif kind == "npy":
        np.save(path, ids.astype(np.uint16))
        config = data_config(tokens=[str(path)], sequence_length=end - begin)
    else:
        path = path.with_suffix(".bin")
        ids.astype(np.uint16).tofile(path)
        names = [str(path)] * (1 + (kind == "joined"))
        config = data_config(tokens=names, sequence_length=end - begin)
    batches = open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=257)
    if kind == "text":
        path = next(tmp_path.glob("run/data/*/tokens/c/0"))
    offset_bytes = 2 * begin + (128 if kind == "npy" else 0)  # of which NumPy's header is 128
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached(file.fileno(), offset_bytes):
            pytest.skip("this file system keeps what it is told to drop, or cannot say it")
        batches.batch(begin // (end - begin) + 1 - 3, 0)  # some before
        deadline = time.monotonic() + 10
        while not cached(file.fileno(), offset_bytes):
            assert time.monotonic() < deadline, "nothing was read ahead"
            time.sleep(0.01)


def cached(descriptor: int, offset: int) -> bool:
    """Whether a byte can be read without a disk; True too where the system cannot say it."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_ids_beyond_the_vocabulary_are_refused_at_every_start(
    tmp_path: Path, data_config: Config
) -> None:
    """The largest id is recorded: the second start refuses without reading the file again."""
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "a.bin")
    config = data_config(tokens=[str(tmp_path / "a.bin")])
    for _ in range(2):
        open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=20)
        with pytest.raises(ConfigError, match=r"a\.bin has the id 19, .* has 19"):
            open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=19)


def test_changed_ids_are_refused(tmp_path: Path, data_config: Config) -> None:
    """One changed chunk of a zarr array is another corpus."""
    ids = np.arange(20, dtype=np.uint16)
    save_zarr(tmp_path / "a.zarr", ids, chunks=(4,))
    config = data_config(tokens=[str(tmp_path / "a.zarr")])
    open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)
    zarr.open_array(tmp_path / "a.zarr", mode="r+")[3] = 9
    with pytest.raises(ConfigError, match=r"a\.zarr has changed"):
        open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)


def test_what_is_not_ids_is_refused(tmp_path: Path, data_config: Config) -> None:
    """Each kind of wrong file has its message, and nothing is written."""
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "ids.txt").write_text("1 2 3")
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY")
    np.save(tmp_path / "float.npy", np.ones(9))
    np.save(tmp_path / "matrix.npy", np.ones((3, 3), dtype=np.int32))
    np.save(tmp_path / "negative.npy", np.full(9, -1))
    np.save(tmp_path / "short.npy", np.ones(7, dtype=np.int32))
    np.save(tmp_path / "objects.npy", np.array([{}] * 9))
    (tmp_path / "folder").mkdir()
    save_zarr(tmp_path / "float.zarr", np.ones(9), chunks=(4,))
    for name, message in {
        "odd.bin": "3 bytes, which is not a whole number",
        "ids.txt": "neither .bin",
        "torn.npy": "cannot read",
        "float.npy": "holds float64 of shape",
        "matrix.npy": r"of shape \[3, 3\]",
        "negative.npy": "has the id -1",
        "short.npy": "7 tokens, one sequence needs 8",
        "objects.npy": "cannot read",
        "folder": "does not open as a zarr array",
        "float.zarr": "holds float64",
        "missing.bin": "no file matches",
    }.items():
        config = data_config(tokens=[str(tmp_path / name)])
        with pytest.raises(ConfigError, match=message):
            open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)
    assert not (tmp_path / "run").exists()


def test_a_zarr_array_of_huge_chunks_is_refused(tmp_path: Path, data_config: Config) -> None:
    """Reading holds one chunk in memory, so its size has a limit."""
    zarr.create_array(store=tmp_path / "a.zarr", shape=(2**26,), chunks=(2**26,), dtype=np.uint16)
    config = data_config(tokens=[str(tmp_path / "a.zarr")])
    with pytest.raises(ConfigError, match="have 128 MiB"):
        open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)


def test_a_negative_id_is_named_before_the_model_meets_it(
    tmp_path: Path, data_config: Config
) -> None:
    """The first micro-batch is what the capture runs the model on."""
    np.save(tmp_path / "ids.npy", np.where(np.arange(90) == 7, -100, 5))
    config = data_config(tokens=[str(tmp_path / "ids.npy")])
    with pytest.raises(ConfigError, match=r"ids\.npy has the id -100 as its token 7: "):
        open_example(config, model_vocabulary=9)
