"""Text files become packed sequences, once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from swaptrain.config.data import DataConfig
from swaptrain.data import Batches, open_data, open_example
from swaptrain.data.tokens import token_array as token_array_module
from swaptrain.errors import ConfigError, RunError

Corpus = Callable[..., Path]
Config = Callable[..., DataConfig]
END = 256


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "x"


def opened(config: DataConfig, run_dir: Path, vocabulary: int | None = None) -> Batches:
    return open_data(config, seed=0, run_dir=run_dir, model_vocabulary=vocabulary)


def ids(batches: Batches) -> list[int]:
    """Return the tokens of all items in order."""
    return [
        token
        for step in range(1, len(batches) + 1)
        for token in batches.batch(step, 0)["input_ids"].flatten().tolist()
    ]


def packed(*documents: bytes, length: int = 8) -> list[int]:
    """Return what the packing should give: documents with their end tokens, cut to sequences."""
    tokens = [token for document in documents for token in (*document, END)]
    return tokens[: len(tokens) // length * length]


def test_documents_are_packed_in_sorted_order(
    corpus: Corpus, data_config: Config, run_dir: Path
) -> None:
    """Files come sorted, each once and each with an end token; the last partial one is dropped."""
    directory = corpus(b="second text", a="first", c="", d="the last one")
    config = data_config(text=[f"{directory}/*.txt", f"{directory}/b.txt"])
    batches = opened(config, run_dir, 257)
    assert ids(batches) == packed(b"first", b"second text", b"", b"the last one")
    assert batches.tokens_per_micro_batch == 8
    example = batches.example()
    assert example["input_ids"].dtype == torch.int64
    assert torch.equal(example["input_ids"], example["labels"])
    assert example["input_ids"].data_ptr() != example["labels"].data_ptr()


def test_subdirectories_and_relative_globs(
    corpus: Corpus, data_config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`**` reaches into subdirectories, and a relative glob starts at the current directory."""
    directory = corpus(z="outermost")
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "deep" / "er" / "a.txt").write_text("inner text")
    monkeypatch.chdir(directory.parent)
    assert ids(opened(data_config(text=["corpus/**/*.txt"]), run_dir)) == packed(
        b"inner text", b"outermost"
    )


def test_tokens_across_chunks(
    corpus: Corpus, data_config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that cross chunks read right, and the array is one that zarr opens."""
    monkeypatch.setattr(token_array_module, "CHUNK_TOKENS", 100)
    content = bytes(np.random.default_rng(0).integers(0, 256, 1234, dtype=np.uint8))
    directory = corpus(a=content, b=bytes(300))
    batches = opened(data_config(text=[f"{directory}/*.txt"], text_as_is=True), run_dir)
    assert ids(batches) == packed(content, bytes(300))
    array = zarr.open_array(run_dir / "data" / batches.digest / "tokens", mode="r")
    assert array.dtype == np.uint16
    assert np.asarray(array[:]).tolist() == [*content, END, *bytes(300), END]


def test_a_second_start_reads_neither_text_nor_writes(
    corpus: Corpus, data_config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged sizes and times are believed: no file is read, and the items are the same."""
    directory = corpus(a="some text that is long enough")
    config = data_config(text=[f"{directory}/*.txt"])
    first = opened(config, run_dir)
    monkeypatch.setattr("swaptrain.data.corpus.read_pieces", None)
    monkeypatch.setattr("swaptrain.data.text.write_token_array", None)
    again = opened(config, run_dir)
    assert ids(again) == ids(first)
    assert again.digest == first.digest


def test_a_touched_file_is_no_change(corpus: Corpus, data_config: Config, run_dir: Path) -> None:
    """A file with another time but the same bytes is the same corpus."""
    directory = corpus(a="some text that is long enough")
    config = data_config(text=[f"{directory}/*.txt"])
    digest = opened(config, run_dir).digest
    os.utime(directory / "a.txt", ns=(1, 1))
    assert opened(config, run_dir).digest == digest
    assert json.loads((run_dir / "data" / "train.json").read_bytes())["files"][0][2] == 1


def test_a_changed_corpus_is_refused_naming_the_files(
    corpus: Corpus, data_config: Config, run_dir: Path
) -> None:
    """Changed, new and lost files are named; --fresh takes the new corpus."""
    directory = corpus(a="some text that is long enough", b="other", c="third")
    config = data_config(text=[f"{directory}/*.txt"])
    opened(config, run_dir)
    corpus(a="SOME text that is long enough", d="a new one")
    (directory / "b.txt").unlink()
    with pytest.raises(ConfigError) as caught:
        opened(config, run_dir)
    message = str(caught.value)
    assert "a.txt has changed" in message
    assert "b.txt is gone" in message
    assert "d.txt is new" in message
    assert "c.txt" not in message
    assert "--fresh" in message
    fresh = open_data(config, seed=0, run_dir=run_dir, model_vocabulary=None, fresh=True)
    assert ids(fresh)[:4] == list(b"SOME")
    assert opened(config, run_dir).digest == fresh.digest


def test_an_unfinished_array_is_built_anew(
    corpus: Corpus, data_config: Config, run_dir: Path
) -> None:
    """Without the marker, or with a chunk missing or short, the tokens are made again."""
    directory = corpus(a="some text that is long enough")
    config = data_config(text=[f"{directory}/*.txt"])
    first = opened(config, run_dir)
    home = run_dir / "data" / first.digest
    expected = ids(first)
    (home / "complete").unlink()
    (home / "tokens" / "c" / "0").write_bytes(b"torn")
    assert ids(opened(config, run_dir)) == expected
    os.truncate(home / "tokens" / "c" / "0", 10)
    assert ids(opened(config, run_dir)) == expected
    (home / "tokens" / "c" / "0").unlink()
    assert ids(opened(config, run_dir)) == expected


def test_runs_share_a_cache(
    corpus: Corpus, data_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs with one data.cache tokenise once; each still notices a changed corpus."""
    directory = corpus(a="some text that is long enough")
    config = data_config(text=[f"{directory}/*.txt"], cache=str(tmp_path / "cache"))
    one = opened(config, tmp_path / "one")
    monkeypatch.setattr("swaptrain.data.text.write_token_array", None)
    two = opened(config, tmp_path / "two")
    assert ids(one) == ids(two)
    assert not (tmp_path / "two" / "data" / one.digest).exists()
    corpus(a="another text that is long enough")
    with pytest.raises(ConfigError, match=r"a\.txt has changed"):
        opened(config, tmp_path / "two")


def test_a_file_that_shrinks_while_training_is_an_error_of_the_run(
    corpus: Corpus, data_config: Config, run_dir: Path
) -> None:
    """A token array that is cut under the run gives RunError with its path."""
    directory = corpus(a="some text that is long enough")
    batches = opened(data_config(text=[f"{directory}/*.txt"]), run_dir)
    os.truncate(run_dir / "data" / batches.digest / "tokens" / "c" / "0", 3)
    with pytest.raises(RunError, match="tokens/c/0"):
        batches.batch(1, 0)


def test_refusals_write_nothing(corpus: Corpus, data_config: Config, run_dir: Path) -> None:
    """No match, an empty corpus, a short one, a small vocabulary: refused, no run directory."""
    directory = corpus(a="short", empty="")
    for message, fields, vocabulary in (
        ("no file matches", {"text": [f"{directory}/*.md"]}, 257),
        ("only directories", {"text": [str(directory)]}, 257),
        ("corpus is empty", {"text": [f"{directory}/empty.txt"]}, 257),
        ("6 tokens, one sequence needs 8", {"text": [f"{directory}/a.txt"]}, 257),
        ("257 ids, the model's vocabulary has 256", {"text": [f"{directory}/*.txt"]}, 256),
        ("no directory /nowhere", {"text": [f"{directory}/*"], "tokenizer": "/nowhere"}, None),
    ):
        config = data_config(**fields)
        with pytest.raises(ConfigError, match=message):
            opened(config, run_dir, vocabulary)
        with pytest.raises(ConfigError, match=message):
            open_example(config, model_vocabulary=vocabulary)
    assert not run_dir.parent.exists()


def test_an_unreadable_file_is_refused(corpus: Corpus, data_config: Config, run_dir: Path) -> None:
    """A file that cannot be read is named (here: a link that points to itself)."""
    directory = corpus(a="some text that is long enough")
    (directory / "loop.txt").symlink_to("loop.txt")
    with pytest.raises(ConfigError, match=r"cannot read .*loop\.txt"):
        opened(data_config(text=[f"{directory}/*.txt"]), run_dir)


def test_the_example_is_the_first_sequences(
    corpus: Corpus, data_config: Config, run_dir: Path
) -> None:
    """open_example gives batch(1, 0) where nothing is shuffled, and repeats a corpus too short."""
    directory = corpus(a="some text", b="more text")
    config = data_config(text=[f"{directory}/*.txt"], micro_batch=2)
    example = open_example(config, model_vocabulary=None)
    assert not run_dir.exists()
    assert torch.equal(example["input_ids"], opened(config, run_dir).example()["input_ids"])
    larger = open_example(
        data_config(text=[f"{directory}/*.txt"], micro_batch=5), model_vocabulary=None
    )
    assert larger["labels"].shape == (5, 8)
    assert larger["labels"].flatten()[20:24].tolist() == list(b"some")


@pytest.mark.parametrize(("vocabulary", "said"), [(257, 0), (32_000, 1)])
def test_bytes_for_a_model_of_words_are_said_once(
    corpus: Corpus, data_config: Config, tmp_path: Path, vocabulary: int, said: int
) -> None:
    """Whoever forgot the tokenizer hears of it at the first start, not at the next one."""
    config = data_config(text=[f"{corpus(a='some text of bytes')}/*"])
    notes: list[str] = []
    for _ in range(2):
        open_data(config, seed=0, run_dir=tmp_path, model_vocabulary=vocabulary, note=notes.append)
    assert sum("data.tokenizer is bytes" in note for note in notes) == said
