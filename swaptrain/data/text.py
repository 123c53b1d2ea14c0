"""A text corpus becomes token ids: its documents in order, each followed by an end token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swaptrain.data.corpus import CorpusFile, stat_file
from swaptrain.data.documents import NotTextError
from swaptrain.data.tokenizer import Tokenizer
from swaptrain.data.tokens.token_array import Array, TokenArray, write_token_array
from swaptrain.data.tokens.token_cache import built_once, find_built
from swaptrain.errors import ConfigError
from swaptrain.units import format_size, how_many

__all__ = ["check_unchanged", "document_tokens", "tokenised", "tokens_on_disk", "too_short"]

_SAID_EVERY_S = 10.0


def tokenised(
    root: Path,
    digest: str,
    files: Sequence[CorpusFile],
    tokenizer: Tokenizer,
    *,
    at_least: int,
    key: str,
    note: Callable[[str], None],
) -> TokenArray:
    """Return the tokens of the corpus, building the array where there is no complete one.

    Raises ConfigError, and leaves nothing behind, if there are fewer than `at_least` tokens or a
    file changes meanwhile.
    """

    def build(path: Path) -> tuple[int, Mapping[str, Any]]:
        size_bytes = sum(file.size_bytes for file in files)
        note(f"tokenising {how_many(len(files), 'file')}, {format_size(size_bytes)}")
        pieces = document_tokens(files, tokenizer, key, done=_HowFar(files, note).done)
        length = write_token_array(path, pieces, tokenizer.vocabulary)
        if length < at_least:
            raise too_short(key, length, at_least)
        check_unchanged(files, key)
        return length, {}

    return built_once(root, digest, tokenizer.vocabulary, build).tokens


class _HowFar:
    """Says from time to time how much of a corpus is tokenised."""

    def __init__(self, files: Sequence[CorpusFile], note: Callable[[str], None]) -> None:
        self._total_bytes, self._note = sum(file.size_bytes for file in files), note
        self._done_bytes = 0
        self._begun = self._said = time.monotonic()

    def done(self, file: CorpusFile) -> None:
        """A document is tokenised."""
        self._done_bytes += file.size_bytes
        now = time.monotonic()
        if now - self._said > _SAID_EVERY_S:
            self._said = now
            per_s = format_size(self._done_bytes / (now - self._begun))
            of = f"{format_size(self._done_bytes)} of {format_size(self._total_bytes)}"
            self._note(f"{of} so far, {per_s} a second")


def check_unchanged(files: Sequence[CorpusFile], key: str) -> None:
    """Raise ConfigError where a file is not what it was when its digest was taken."""
    for file in files:
        if not stat_file(file.path, key).looks_like(file):
            raise ConfigError(f"{key}: {file.path} changed while it was read: start again")


def document_tokens(
    files: Sequence[CorpusFile],
    tokenizer: Tokenizer,
    key: str,
    *,
    done: Callable[[CorpusFile], None] = lambda _: None,
) -> Iterator[Array]:
    """Yield the ids of all documents in order, each followed by one end token, in small pieces.

    `done` hears of each document that has been given.
    """
    end = np.array([tokenizer.end_token])
    documents = tokenizer.documents(Path(file.path) for file in files)
    for file in files:
        try:
            yield from next(documents)
        except OSError as error:
            raise ConfigError(f"{key}: cannot read {file.path}: {error.strerror}") from error
        except NotTextError as error:
            raise ConfigError(f"{key}: {file.path} {error}") from error
        yield end
        done(file)


def tokens_on_disk(root: Path, digest: str, tokenizer: Tokenizer) -> int | None:
    """Return how many tokens an earlier start left of the corpus; None where there are none."""
    found = find_built(root, digest, tokenizer.vocabulary)
    return None if found is None else len(found.tokens)


def too_short(key: str, tokens: int, needed: int) -> ConfigError:
    """Return the refusal of a corpus that does not fill one sequence."""
    return ConfigError(
        f"{key}: the corpus has {how_many(tokens, 'token')}, one sequence needs {needed:,}: give "
        "it more text or set data.sequence_length lower"
    )
