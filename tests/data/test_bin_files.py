"""A raw file of ids is read as what it is, or refused with the key that says it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from swaptrain.config.data import DataConfig, EvalConfig
from swaptrain.data import open_data, open_eval, open_example
from swaptrain.errors import ConfigError

Config = Callable[..., DataConfig]
WORDS = 128_256
DRAWN = np.random.default_rng(0)
WIDE = DRAWN.integers(0, 128_000, 4096)
"""What Llama 3's vocabulary needs."""
NARROW = DRAWN.integers(0, 50_257, 4096)
CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def read(config: DataConfig, run_dir: Path, vocabulary: int | None) -> list[int]:
    open_example(config, model_vocabulary=vocabulary)
    data = open_data(config, seed=0, run_dir=run_dir, model_vocabulary=vocabulary)
    return [int(i) for step in range(1, len(data) + 1) for i in data.batch(step, 0)["input_ids"][0]]


def refused(config: DataConfig, run_dir: Path, vocabulary: int | None, message: str) -> None:
    """Both ways in refuse, and nothing is written."""
    with pytest.raises(ConfigError, match=message):
        open_example(config, model_vocabulary=vocabulary)
    with pytest.raises(ConfigError, match=message):
        open_data(config, seed=0, run_dir=run_dir, model_vocabulary=vocabulary)
    assert not run_dir.exists()


def index(ids: int, code: int, sequences: int = 2) -> bytes:
    """Return an index as Megatron-LM writes it."""
    lengths = [ids // sequences] * (sequences - 1)
    lengths.append(ids - sum(lengths))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, sequences, sequences + 1)
    return head + np.array(lengths, "<i4").tobytes() + bytes(8 * sequences + 8 * (sequences + 1))


def header(magic: int, version: int, ids: int) -> bytes:
    """Return a header as llm.c writes it."""
    numbers = np.zeros(256, "<i4")
    numbers[:3] = magic, version, ids
    return numbers.tobytes()


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64", "uint64"])
def test_wide_ids_without_a_word_are_refused_and_read_with_the_key(
    dtype: str, tmp_path: Path, data_config: Config
) -> None:
    """A vocabulary that 16 bits cannot hold, and one that is not known: the dtype is named."""
    WIDE.astype(dtype).tofile(tmp_path / "a.bin")
    config = data_config(tokens=[str(tmp_path / "a.bin")])
    wide = "int64" if "64" in dtype else "uint32"
    refused(config, tmp_path / "run", WORDS, rf"128,256: set data\.token_dtype, probably to {wide}")
    refused(
        config, tmp_path / "run", None, rf"looks like {wide}, .* set data\.token_dtype to {wide}"
    )
    named = data_config(tokens=[str(tmp_path / "a.bin")], token_dtype=dtype)
    assert read(named, tmp_path / "run", WORDS) == WIDE.tolist()


@pytest.mark.parametrize(
    "ids", [NARROW, NARROW % 4, NARROW % 65, np.where(NARROW % 3, NARROW, 0), np.sort(NARROW)]
)
def test_ids_below_65536_of_32_bits_look_like_it(
    ids: np.ndarray[Any, Any], tmp_path: Path, data_config: Config
) -> None:
    """Words, letters, four bases: with a small vocabulary nothing else would show it."""
    ids.astype("<u4").tofile(tmp_path / "wide.bin")
    ids.astype("<u2").tofile(tmp_path / "narrow.bin")
    wide = data_config(tokens=[str(tmp_path / "wide.bin")])
    refused(wide, tmp_path / "run", 50_257, "looks like uint32")
    narrow = data_config(tokens=[str(tmp_path / "narrow.bin")])
    assert read(narrow, tmp_path / "run", 50_257) == ids.tolist()


@pytest.mark.parametrize(
    "ids", [np.zeros(99), np.arange(99), np.tile([7, 9], 50), np.full(50, 256 * 3) + np.arange(50)]
)
def test_plain_files_are_not_suspected(
    ids: np.ndarray[Any, Any], tmp_path: Path, data_config: Config
) -> None:
    """Padding alone, counters and patterns of 16 bits are read as they are."""
    ids.astype("<u2").tofile(tmp_path / "a.bin")
    config = data_config(tokens=[str(tmp_path / "a.bin")])
    assert read(config, tmp_path / "run", 2**16) == ids[: len(ids) // 8 * 8].tolist()


def test_what_looks_wrong_can_be_said_to_be_right(tmp_path: Path, data_config: Config) -> None:
    """Ids of which every second one is 0, and multiples of 256, with the key."""
    for name, ids in (("a", np.tile([5, 0, 7, 0], 20)), ("b", np.arange(1, 81) * 256)):
        ids.astype("<u2").tofile(tmp_path / f"{name}.bin")
        config = data_config(tokens=[str(tmp_path / f"{name}.bin")])
        refused(config, tmp_path / "run", None, "looks like .* uint16 if it is right as it is")
        said = config.model_copy(update={"token_dtype": "uint16"})
        assert read(said, tmp_path / f"run-{name}", None) == ids.tolist()


def test_ids_beyond_the_vocabulary_come_with_their_place_and_a_guess(
    tmp_path: Path, data_config: Config
) -> None:
    """The first bad id's position, and as what the file would fit."""
    swapped = NARROW[:64].astype(">u2")
    swapped.tofile(tmp_path / "swapped.bin")
    first = int(np.flatnonzero(swapped.view("<u2") >= 50_257)[0])
    config = data_config(tokens=[str(tmp_path / "swapped.bin")], micro_batch=8)
    refused(config, tmp_path / "run", 50_257, rf"its token {first}, .*big-endian uint16")
    NARROW.astype("<u2").tofile(tmp_path / "narrow.bin")
    config = data_config(tokens=[str(tmp_path / "narrow.bin")], token_dtype="uint32")
    refused(config, tmp_path / "run", 50_257, "its token 0, .*read as uint16")
    (NARROW[:64] % 65).astype("u1").tofile(tmp_path / "bytes.bin")
    config = data_config(tokens=[str(tmp_path / "bytes.bin")])
    refused(config, tmp_path / "run", 65, "read as uint8")
    late = np.append(NARROW[:90], 50_257).astype("<u2")
    late.tofile(tmp_path / "late.bin")
    config = data_config(tokens=[str(tmp_path / "late.bin")])
    with pytest.raises(ConfigError, match="has the id 50257, its token 90,"):
        read(config, tmp_path / "run", 50_257)
    np.append(np.arange(20), -5).astype("<i4").tofile(tmp_path / "negative.bin")
    config = data_config(tokens=[str(tmp_path / "negative.bin")], token_dtype="int32")
    with pytest.raises(ConfigError, match="has the id -5 as its token 20"):
        read(config, tmp_path / "run", 50_257)


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "ids"),
    [(20240520, 1, "uint16", NARROW), (20240801, 7, "uint32", WIDE)],
)
def test_the_headers_of_llm_c(
    magic: int, version: int, dtype: str, ids: np.ndarray[Any, Any], tmp_path: Path,
    data_config: Config,
) -> None:  # fmt: skip
    """They say dtype and count, and are no tokens; what they say has to be so."""
    file, raw = tmp_path / "a.bin", ids.astype(dtype).tobytes()
    file.write_bytes(header(magic, version, len(ids)) + raw)
    config = data_config(tokens=[str(file)])
    assert read(config, tmp_path / "run", WORDS) == ids.tolist()
    other = config.model_copy(update={"token_dtype": "int64"})
    refused(other, tmp_path / "other", WORDS, f"says itself that its ids are {dtype}")
    for count, content in ((len(ids) + 1, raw), (len(ids), raw + b"\0"), (len(ids), raw[:-4])):
        file.write_bytes(header(magic, version, count) + content)
        refused(config, tmp_path / "other", WORDS, "a header that says")
    file.write_bytes(header(magic, version + 1, len(ids)) + raw)
    refused(config, tmp_path / "other", WORDS, "header of llm.c with version")


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_the_index_of_megatron(dtype: str, tmp_path: Path, data_config: Config) -> None:
    """A .idx beside the file says the dtype; its lengths have to agree; a pickle is not opened."""
    ids = NARROW if dtype == "uint16" else WIDE
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    idx = tmp_path / "a.idx"
    idx.write_bytes(index(len(ids), CODES[dtype]))
    config = data_config(tokens=[str(tmp_path / "a.bin")])
    assert read(config, tmp_path / "run", WORDS) == ids.tolist()
    idx.write_bytes(b"TNTIDX\x00\x00" + struct.pack("<QQQ", 1, CODES[dtype], 4))
    assert read(config, tmp_path / "run", WORDS) == ids.tolist()
    idx.write_bytes(index(len(ids) + 1, CODES[dtype]))
    refused(config, tmp_path / "other", WORDS, "one of them was cut")
    idx.write_bytes(index(len(ids), CODES["float32"]))
    refused(config, tmp_path / "other", WORDS, "holds no integers")
    idx.write_bytes(b"another index")
    refused(config, tmp_path / "other", WORDS, "no index of Megatron-LM: set data.token_dtype")
    said = config.model_copy(update={"token_dtype": dtype})
    assert read(said, tmp_path / "said", WORDS) == ids.tolist()


def test_other_files_and_sizes(tmp_path: Path, data_config: Config) -> None:
    """A checkpoint, NumPy under another name, part of a number, nothing at all, a float dtype."""
    np.save(tmp_path / "array.npy", NARROW)
    os.rename(tmp_path / "array.npy", tmp_path / "array.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "text.bin").write_text("some text of words\n" * 10)
    (tmp_path / "odd.bin").write_bytes(bytes(101))
    (tmp_path / "empty.bin").write_bytes(b"")
    for name, message in {
        "array": "a NumPy file",
        "pytorch_model": "a zip archive, as checkpoints are",
        "text": r"looks like text, .* data\.text",
        "odd": "101 bytes, which is not a whole number of uint16",
        "empty": "empty.bin holds no tokens",
    }.items():
        config = data_config(tokens=[str(tmp_path / f"{name}.bin")])
        refused(config, tmp_path / "run", None, message)
    (tmp_path / "six.bin").write_bytes(bytes(6))
    config = data_config(tokens=[str(tmp_path / "six.bin")], token_dtype="int32")
    refused(config, tmp_path / "run", None, "6 bytes, which is not a whole number of int32")
    with pytest.raises(ValueError, match="token_dtype"):
        data_config(tokens=["a.bin"], token_dtype="float32")


def test_numpy_and_zarr_say_it_themselves(tmp_path: Path, data_config: Config) -> None:
    """Big-endian arrays read right; a wrong count, and chunks that lack, are refused."""
    np.save(tmp_path / "big.npy", WIDE.astype(">i4"))
    config = data_config(tokens=[str(tmp_path / "big.npy")])
    assert read(config, tmp_path / "run", WORDS) == WIDE.tolist()
    with (tmp_path / "big.npy").open("ab") as file:
        file.write(b"more")
    refused(config, tmp_path / "other", WORDS, "a header that says 4,096 ids")
    np.save(tmp_path / "large.npy", np.array([1] * 10 + [2**63 + 5], dtype=np.uint64))
    config = data_config(tokens=[str(tmp_path / "large.npy")])
    with pytest.raises(ConfigError, match="as its token 10: ids are 0 or more, and less than"):
        read(config, tmp_path / "other", WORDS)
    path = tmp_path / "a.zarr"
    array = zarr.create_array(path, shape=(20,), chunks=(5,), dtype="u2", fill_value=7)
    array[:10] = np.arange(10)
    config = data_config(tokens=[str(path)])
    refused(config, tmp_path / "other", WORDS, "lacks 2 of its 4 chunks, .* read as 7")
    array[10:] = np.arange(10)
    assert read(config, tmp_path / "zarr", WORDS) == [*range(10), *range(6)]


def test_another_dtype_is_other_data_and_held_out_data_has_its_own(
    tmp_path: Path, data_config: Config
) -> None:
    """A run refuses it and --fresh reads anew; eval.token_dtype is data's unless it is set."""
    (NARROW % 200).astype("<u4").tofile(tmp_path / "a.bin")
    (NARROW % 200).astype("<u2").tofile(tmp_path / "b.bin")
    config = data_config(tokens=[str(tmp_path / "a.bin")], token_dtype="uint32")
    read(config, tmp_path / "run", 300)
    other = config.model_copy(update={"token_dtype": "uint16"})
    with pytest.raises(ConfigError, match=r"data\.token_dtype has changed"):
        read(other, tmp_path / "run", 300)
    as_bytes = config.model_copy(update={"token_dtype": "uint8"})
    fresh = open_data(as_bytes, seed=0, run_dir=tmp_path / "run", model_vocabulary=300, fresh=True)
    assert len(fresh) == 4096 * 4 // 8
    held_out = EvalConfig(tokens=[str(tmp_path / "a.bin")], every=1)  # type: ignore[arg-type]
    found = open_eval(held_out, config, run_dir=tmp_path / "eval", model_vocabulary=300)
    assert len(found) == 4096 // 8
    own = EvalConfig(tokens=[str(tmp_path / "b.bin")], token_dtype="uint16", every=1)  # type: ignore[arg-type]
    found = open_eval(own, config, run_dir=tmp_path / "eval", model_vocabulary=300)
    assert len(found) == 4096 // 8
