"""What files hold: kind of rows or text, and how long they are in tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from swaptrain.chat import EncodeSettings, RowError, encode_files, read_template
from swaptrain.chat.files import SUFFIXES, read_rows
from swaptrain.chat.refusal import refused
from swaptrain.chat.rows import Conversation, Document, Prompted, parse_row
from swaptrain.data.corpus import CorpusFile, find_files
from swaptrain.data.text import document_tokens
from swaptrain.data.tokenizer import open_tokenizer
from swaptrain.errors import ConfigError
from swaptrain.units import format_count, format_size

__all__ = ["DataFacts", "look_at_data"]

_KEY = "--data"
_TOKENS = (".bin", ".npy", ".zarr")
_MOST_ROWS = 5_000
"""Whose tokens are counted; what the others have is reckoned from them."""
_MOST_TEXT_TOKENS = 2**20
_NAMES = {Conversation: "conversations", Prompted: "prompts and completions", Document: "texts"}


@dataclass(frozen=True)
class DataFacts:
    """Files and what they come to."""

    kind: Literal["chat", "text"]
    patterns: tuple[str, ...]
    """As given on the command line."""
    what: str
    """What the rows or files are, in words."""
    tokenizer: str
    """A directory, or `bytes`."""
    template: str | None
    """What `data.chat_template` is to be; None: the tokenizer's own, or none is needed."""
    rows: int
    """Of `chat`; reckoned from their bytes where there are many. Of `text` the files."""
    tokens: int
    """Of all of them, reckoned likewise."""
    lengths: tuple[int, ...]
    """Tokens of the rows that were counted, sorted; empty for text."""
    distinct: int
    """Rows that differ, of those that were counted."""
    is_whole: bool
    """Whether every row was counted."""

    def percentile(self, part: float) -> int:
        """Return the tokens that this part of the rows do not exceed."""
        return int(np.quantile(self.lengths, part, method="inverted_cdf"))

    def line(self) -> str:
        """Say it in one sentence."""
        about = "" if self.is_whole else "about "
        size = f"{self.what}, {about}{format_count(self.tokens)} tokens"
        if not self.lengths:
            return size
        parts = [f"{name} {self.percentile(p):,}" for name, p in (("half", 0.5), ("95 %", 0.95))]
        return (
            f"{size}; tokens a row: {', '.join(parts)}, 99 % {self.percentile(0.99):,} at most, "
            f"the longest {self.lengths[-1]:,}"
        )


def look_at_data(
    patterns: Sequence[str], model: Path, *, template: str | None, processes: int
) -> DataFacts:
    """Return what the files are, with the tokenizer of the directory `model`.

    `template` is a file of Jinja, instead of the tokenizer's. Raises ConfigError for files that are
    missing, of several kinds, or none that a config can name.
    """
    files = find_files(patterns, key=_KEY, directories=True)
    for file in files:
        if Path(file.path).suffix.lower() in _TOKENS:
            raise ConfigError(
                f"{_KEY}: {file.path} holds token ids: a config names such files in data.tokens"
            )
    rows = [file for file in files if _holds_rows(file)]
    other = next((file.path for file in files if file not in rows), None)
    if rows and other is not None:
        raise ConfigError(
            f"{_KEY}: {rows[0].path} holds rows, and {other} is text: a config has one kind of data"
        )
    has_tokenizer = (model / "tokenizer.json").is_file()
    if not rows:
        return _text(patterns, files, str(model) if has_tokenizer else "bytes")
    if not has_tokenizer:
        raise ConfigError(
            f"{_KEY}: rows need a tokenizer, and {model} has no tokenizer.json: add the model's"
        )
    return _chat(patterns, rows, model, template, processes)


def _holds_rows(file: CorpusFile) -> bool:
    if os.path.isdir(file.path):
        if (Path(file.path) / "state.json").is_file():
            return True
        raise ConfigError(f"{_KEY}: {file.path} is a directory: name its files, '{file.path}/*'")
    return Path(file.path).suffix.lower() in SUFFIXES


def _chat(
    patterns: Sequence[str],
    files: list[CorpusFile],
    model: Path,
    template: str | None,
    processes: int,
) -> DataFacts:
    place, first = next(read_rows(files[0].path, _KEY), ("", b""))
    if not first:
        raise ConfigError(f"{_KEY}: {files[0].path} holds no rows: give it data to train on")
    try:
        kind = type(parse_row(first))
    except RowError as error:
        raise refused(_KEY, files[0].path, place, error) from error
    if kind is Conversation and read_template(model, template) is None:
        raise ConfigError(
            f"{_KEY}: {files[0].path} holds conversations, and {model} has no chat template: give "
            "--chat-template FILE, Jinja that fits the model"
        )
    settings = EncodeSettings(model, template)
    paths = [file.path for file in files]
    encoded = encode_files(paths, settings, key=_KEY, processes=processes)
    lengths = sorted(len(row.ids) for row in islice(encoded, _MOST_ROWS) if row.trained.any())
    if not lengths:
        raise ConfigError(
            f"{_KEY}: nothing is trained in the rows of {files[0].path}: none has an answer"
        )
    is_whole = len(lengths) < _MOST_ROWS
    count = len(lengths) if is_whole else _row_count(files)
    return DataFacts(
        "chat",
        tuple(patterns),
        f"{'' if is_whole else 'about '}{count:,} {_NAMES.get(kind, 'rows of tokens')}",
        str(model),
        template if kind is Conversation else None,
        count,
        round(sum(lengths) * count / len(lengths)),
        tuple(lengths),
        len({row.strip() for row in _first_rows(files)}),
        is_whole,
    )


def _first_rows(files: list[CorpusFile]) -> Iterator[bytes]:
    rows = (row for file in files for _, row in read_rows(file.path, _KEY))
    return islice(rows, _MOST_ROWS)


def _row_count(files: list[CorpusFile]) -> int:
    """Return about how many rows there are, from the bytes of the first ones."""
    taken = [len(row) for row in _first_rows(files)]
    total_bytes = sum(file.size_bytes for file in files)
    return max(_MOST_ROWS, round(total_bytes * len(taken) / max(1, sum(taken))))


def _text(patterns: Sequence[str], files: list[CorpusFile], name: str) -> DataFacts:
    tokenizer = open_tokenizer(name)
    total_bytes = sum(file.size_bytes for file in files)
    tokens, read_bytes = 0, 0

    def done(file: CorpusFile) -> None:
        nonlocal read_bytes
        read_bytes += file.size_bytes

    is_whole = True
    for piece in document_tokens(files, tokenizer, _KEY, done=done):
        tokens += len(piece)
        if tokens >= _MOST_TEXT_TOKENS and read_bytes:
            is_whole = False
            break
    total = tokens if is_whole else round(tokens * total_bytes / read_bytes)
    what = f"text in {len(files):,} file{'s' * (len(files) != 1)}, {format_size(total_bytes)}"
    return DataFacts("text", tuple(patterns), what, name, None, len(files), total, (), 0, is_whole)
