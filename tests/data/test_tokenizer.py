"""Hugging Face tokenizers from a local directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swaptrain.config.data import DataConfig
from swaptrain.data import open_data
from swaptrain.data import text as text_module
from swaptrain.data import tokenizer as tokenizer_module
from swaptrain.data.documents import NotTextError
from swaptrain.data.tokenizer import open_tokenizer
from swaptrain.errors import ConfigError

Corpus = Callable[..., Path]
Config = Callable[..., DataConfig]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make a tokenizer of three words whose end token has id 70,000, and which truncates."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"one": 0, "two": 1, "<unk>": 2, "<eos>": 70_000}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    made = tmp_path / "tokenizer"
    made.mkdir()
    backend.save(str(made / "tokenizer.json"))
    write_config(made, {"eos_token": {"content": "<eos>"}})
    return made


def write_config(directory: Path, content: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(content))


def test_documents_are_whole_and_end_with_the_eos_token(
    directory: Path, corpus: Corpus, data_config: Config, tmp_path: Path
) -> None:
    """Truncation and padding of the file are off, ids above 65,535 are kept."""
    texts = corpus(a="one two one two one", b="two three")
    config = data_config(text=[f"{texts}/*"], tokenizer=str(directory), sequence_length=9)
    batches = open_data(config, seed=0, run_dir=tmp_path, model_vocabulary=70_001)
    expected = [0, 1, 0, 1, 0, 70_000, 1, 2, 70_000]
    assert batches.example()["input_ids"].tolist() == [expected]


@pytest.mark.parametrize("most", [1, 12, 2**22])
def test_documents_encoded_together_stay_apart(
    most: int, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, whatever fits together; one that is no text raises where it is asked for."""
    monkeypatch.setattr(tokenizer_module, "_MOST_CHARACTERS", most)
    texts = ["one two", "", "two two one", "one", "two"]
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    paths[3].write_bytes(b"one \xff two")
    documents = open_tokenizer(directory).documents(paths)
    found = [np.concatenate(list(next(documents))).tolist() for _ in range(3)]
    assert found == [[0, 1], [], [1, 1, 0]]
    with pytest.raises(NotTextError, match=r"byte 4"):
        next(documents)


def test_how_far_it_is_is_said(
    directory: Path, corpus: Corpus, data_config: Config, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the bytes of all files."""
    monkeypatch.setattr(text_module, "_SAID_EVERY_S", -1.0)
    texts = corpus(a="one two one two one two one two one", b="two three")
    config = data_config(text=[f"{texts}/*"], tokenizer=str(directory))
    said: list[str] = []
    open_data(config, seed=0, run_dir=tmp_path, model_vocabulary=None, note=said.append)
    assert "35 B of 44 B so far" in said[1]
    assert "44 B of 44 B so far" in said[2]


def test_a_changed_tokenizer_is_refused(
    directory: Path, corpus: Corpus, data_config: Config, tmp_path: Path
) -> None:
    """The tokenizer is part of what the run began with."""
    texts = corpus(a="one two one two one two one two")
    config = data_config(text=[f"{texts}/*"], tokenizer=str(directory))
    open_data(config, seed=0, run_dir=tmp_path, model_vocabulary=None)
    write_config(directory, {"eos_token": "two"})
    with pytest.raises(ConfigError, match=r"the tokenizer .* has changed"):
        open_data(config, seed=0, run_dir=tmp_path, model_vocabulary=None)


def test_too_few_tokens_are_found_after_tokenising_and_cleaned_up(
    directory: Path, corpus: Corpus, data_config: Config, tmp_path: Path
) -> None:
    """A corpus whose tokens are too few leaves no run directory behind."""
    texts = corpus(a="one two one two")
    config = data_config(text=[f"{texts}/*"], tokenizer=str(directory), sequence_length=6)
    run_dir = tmp_path / "runs" / "x"
    with pytest.raises(ConfigError, match="5 tokens, one sequence needs 6"):
        open_data(config, seed=0, run_dir=run_dir, model_vocabulary=None)
    assert not run_dir.parent.exists()


def test_text_that_is_not_utf8_is_named(
    directory: Path, corpus: Corpus, data_config: Config, tmp_path: Path
) -> None:
    """A file in another encoding is refused with its name and the byte."""
    texts = corpus(a="one", b=b"two \xff one")
    config = data_config(text=[f"{texts}/*"], tokenizer=str(directory), sequence_length=2)
    with pytest.raises(ConfigError, match=r"b\.txt is not UTF-8 \(byte 4\)"):
        open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=None)


@pytest.mark.parametrize("content", [{}, {"eos_token": None}, {"eos_token": "<end>"}, [1]])
def test_a_directory_without_an_end_token_is_refused(directory: Path, content: Any) -> None:
    """The end token separates documents, so a tokenizer without one cannot be used."""
    write_config(directory, content)
    with pytest.raises(ConfigError, match="tokenizer_config"):
        open_tokenizer(str(directory))


def test_a_broken_or_missing_tokenizer_is_refused(directory: Path) -> None:
    """A tokenizer.json that is damaged or not there is named."""
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not usable"):
        open_tokenizer(str(directory))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        open_tokenizer(str(directory))
