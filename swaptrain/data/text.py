"""A text corpus becomes one zarr array of token ids, once; later starts only look at it.

    ROOT/DIGEST/tokens      the array
    ROOT/DIGEST/complete    written last: without it the array is built anew
    ROOT/DIGEST/lock        held while looking and building, for runs that share a cache

ROOT is the run's own data directory, or the one that `data.cache` names.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from swaptrain.data.corpus import CorpusFile, stat_file
from swaptrain.data.documents import NotTextError
from swaptrain.data.token_array import Array, TokenArray, write_token_array
from swaptrain.data.tokenizer import Tokenizer
from swaptrain.errors import ConfigError, RunError
from swaptrain.store.disk.durable_files import flush_directory, make_directory, write_aside
from swaptrain.strict_json import read_json
from swaptrain.units import format_size

__all__ = ["document_tokens", "tokenised", "tokens_on_disk", "too_short"]


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
    home = root / digest
    made = [path for path in (home, *home.parents) if not path.exists()]
    try:
        make_directory(home)
    except RunError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        raise ConfigError(
            f"{error} for the tokens: set run.dir or data.cache to a place that can be written"
        ) from error
    with _locked(home):
        found = _open(home, tokenizer.vocabulary)
        if found is None:
            size_bytes = sum(file.size_bytes for file in files)
            note(f"tokenising {len(files):,} files, {format_size(size_bytes)}")
            try:
                found = _build(home, files, tokenizer, at_least, key)
            except ConfigError:
                _undo(home, made)
                raise
            except RunError:
                shutil.rmtree(home / "tokens", ignore_errors=True)  # the disk may be full of them
                raise
    return found


def document_tokens(files: Sequence[CorpusFile], tokenizer: Tokenizer, key: str) -> Iterator[Array]:
    """Yield the ids of all documents in order, each followed by one end token, in small pieces."""
    end = np.array([tokenizer.end_token])
    for file in files:
        try:
            yield from tokenizer.pieces(Path(file.path))
        except OSError as error:
            raise ConfigError(f"{key}: cannot read {file.path}: {error.strerror}") from error
        except NotTextError as error:
            raise ConfigError(f"{key}: {file.path} {error}") from error
        yield end


def tokens_on_disk(root: Path, digest: str, tokenizer: Tokenizer) -> int | None:
    """Return how many tokens an earlier start left of the corpus; None where there are none."""
    found = _open(root / digest, tokenizer.vocabulary)
    return None if found is None else len(found)


def _open(home: Path, vocabulary: int) -> TokenArray | None:
    try:
        length = read_json(home / "complete", 2**12)["tokens"]
        if type(length) is not int or not 0 < length < 2**48:
            raise ValueError(f"it says {length!r} tokens")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{home / 'complete'} is damaged ({error}): delete {home}") from error
    array = TokenArray(home / "tokens", length, vocabulary)
    return array if array.is_whole() else None


def _build(
    home: Path, files: Sequence[CorpusFile], tokenizer: Tokenizer, at_least: int, key: str
) -> TokenArray:
    if (home / "complete").exists():
        (home / "complete").unlink()
        flush_directory(home)  # a power failure must not bring it back over half of the tokens
    shutil.rmtree(home / "tokens", ignore_errors=True)
    pieces = document_tokens(files, tokenizer, key)
    length = write_token_array(home / "tokens", pieces, tokenizer.vocabulary)
    if length < at_least:
        raise too_short(key, length, at_least)
    for file in files:
        if not stat_file(file.path, key).looks_like(file):
            raise ConfigError(f"{key}: {file.path} changed while it was read: start again")
    write_aside(home / "complete", json.dumps({"tokens": length}).encode())
    return TokenArray(home / "tokens", length, tokenizer.vocabulary)


def too_short(key: str, tokens: int, needed: int) -> ConfigError:
    """Return the refusal of a corpus that does not fill one sequence."""
    return ConfigError(
        f"{key}: the corpus has {tokens:,} tokens, one sequence needs {needed:,}: give it more text"
        " or set data.sequence_length lower"
    )


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the directory's lock; another run that builds the same tokens is waited for."""
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _undo(home: Path, made: list[Path]) -> None:
    """Remove what a refused corpus left: the tokens, and the directories that are new."""
    shutil.rmtree(home / "tokens", ignore_errors=True)
    if home in made:
        shutil.rmtree(home, ignore_errors=True)
    for path in made[1:]:
        if any(path.iterdir()):
            return
        path.rmdir()
