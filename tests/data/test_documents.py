"""What is no text is refused by name and byte; a byte order mark is no text."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from swaptrain.config.data import DataConfig
from swaptrain.data import open_data, open_example
from swaptrain.errors import ConfigError
from tests.support.matrix import proof_but

Config = Callable[..., DataConfig]
MARK = b"\xef\xbb\xbf"
TEXT = "an article of several words\r\n"


@pytest.fixture
def words(tmp_path: Path) -> str:
    """Return the directory of a tokenizer of bytes."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    directory = tmp_path / "words"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return str(directory)


def tokens(config: DataConfig, run_dir: Path) -> list[int]:
    data = open_data(config, seed=0, run_dir=run_dir, model_vocabulary=None)
    return [int(i) for step in range(1, len(data) + 1) for i in data.batch(step, 0)["input_ids"][0]]


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_a_mark_is_dropped_and_line_ends_stay(
    tokenizer: str, words: str, tmp_path: Path, data_config: Config
) -> None:
    """With a mark in front the tokens are those of the text alone; a file of a mark is empty."""
    name = words if tokenizer == "words" else tokenizer
    found = []
    for number, mark in enumerate((b"", MARK)):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "a.txt").write_bytes(mark + TEXT.encode())
        (directory / "b.txt").write_bytes(mark)
        (directory / "c.txt").write_bytes(mark + TEXT.encode() + MARK)
        config = data_config(text=[f"{directory}/*"], tokenizer=name, sequence_length=4)
        found.append(tokens(config, tmp_path / f"run-{number}"))
        example = open_example(config, model_vocabulary=None)
        assert torch.equal(example["input_ids"][0], torch.tensor(found[-1][:4]))
    assert found[0] == found[1]
    if tokenizer == "bytes":
        content = [*TEXT.encode(), 256]
        assert found[0] == [*content, 256, *content[:-1], *MARK, 256][: len(found[0])]


def png() -> bytes:
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(20)


def checkpoint() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.ones(3)}, file)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a.txt", TEXT)
    return file.getvalue()


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "jsonl": ("a.jsonl", b'{"text": "words"}\n' * 9, r"so it holds rows: .* data\.chat"),
    "json": ("a.JSON", b"[]" * 9, r"ends in \.json, so it holds rows"),
    "csv": ("a.csv", b"a,b\n" * 9, "name it under data.chat"),
    "parquet": ("a.parquet", b"PAR1" * 9, "name it under data.chat"),
    "gz": ("a.txt.gz", gzip.compress(TEXT.encode()), r"ends in \.gz, so it is compressed"),
    "gzip": ("a.txt", gzip.compress(TEXT.encode()), "compressed by gzip by its first bytes"),
    "zst": ("a", b"\x28\xb5\x2f\xfd" + b"x" * 9, "compressed by zstd"),
    "zip": ("a.txt", archive(), "a zip archive"),
    "pdf": ("a.txt", b"%PDF-1.7\n" * 9, "is PDF"),
    "png": ("a.png", png(), "is PNG"),
    "pt": ("model.pt", checkpoint(), "a zip archive"),
    "npy": ("a.npy", np.lib.format.magic(1, 0) + b"x", "NUL at byte 7"),
    "late": ("b.txt", b"x" * 2**20 + b"yy\0", "NUL at byte 1048578"),
    "nul": ("a.txt", TEXT.encode() + b"\0", f"NUL at byte {len(TEXT)}"),
    "utf-16": ("a.txt", TEXT.encode("utf-16"), "byte order mark of UTF-16: .* iconv -f UTF-16"),
    "utf-16-be": ("a.txt", b"\xfe\xff" + TEXT.encode("utf-16-be"), "byte order mark of UTF-16"),
    "utf-32": ("a.txt", TEXT.encode("utf-32"), "byte order mark of UTF-32"),
    "utf-16 unmarked": ("a.txt", TEXT.encode("utf-16-le"), "NUL at byte 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", proof_but(REFUSED, *(name for name in REFUSED if name != "late")))
def test_what_is_no_text_is_refused_and_text_as_is_takes_it(
    name: str, tmp_path: Path, data_config: Config
) -> None:
    """File, place and cure; nothing is left behind; the key takes the bytes as they are."""
    file, content, message = REFUSED[name]
    directory = tmp_path / "corpus"
    directory.mkdir()
    (directory / "Z.txt").write_text(TEXT)  # sorted first
    (directory / file).write_bytes(content)
    length = 4 if len(content) < 2**20 else 1024
    fields = {"text": [f"{directory}/*"], "sequence_length": length}
    with pytest.raises(ConfigError, match=message) as caught:
        tokens(data_config(**fields), tmp_path / "run")
    assert str(directory / file) in str(caught.value)
    assert not (tmp_path / "run").exists()
    found = tokens(data_config(**fields, text_as_is=True), tmp_path / "run")
    expected = [*TEXT.encode(), 256, *content, 256]
    assert found == expected[: len(expected) // length * length]


def test_other_encodings(words: str, tmp_path: Path, data_config: Config) -> None:
    """Bytes take Latin-1; a tokenizer of text names the byte, also behind a mark."""
    file = tmp_path / "a.txt"
    file.write_bytes(MARK + TEXT.encode() + "\xe9tude".encode("latin-1"))
    config = data_config(text=[str(file)], sequence_length=4)
    assert 0xE9 in tokens(config, tmp_path / "bytes")
    with pytest.raises(ConfigError, match=rf"a\.txt is not UTF-8 \(byte {3 + len(TEXT)}\)"):
        tokens(config.model_copy(update={"tokenizer": words}), tmp_path / "words-run")
