"""Data becomes one zarr array of numbers, once; later starts only look at it.

    ROOT/DIGEST/tokens      the array
    ROOT/DIGEST/complete    written last: without it the array is built anew
    ROOT/DIGEST/lock        held while looking and building, for runs that share a cache

ROOT is the run's own data directory, or the one that `data.cache` names.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.data.tokens.token_array import TokenArray
from swaptrain.errors import ConfigError, RunError
from swaptrain.store.disk.durable_files import flush_directory, make_directory, write_aside
from swaptrain.strict_json import read_json

__all__ = ["Built", "built_once", "find_built"]

_MOST_BYTES = 2**12


@dataclass(frozen=True)
class Built:
    """An array that is complete, and what was found out while it was built."""

    tokens: TokenArray
    facts: Mapping[str, Any]


def built_once(
    root: Path,
    digest: str,
    vocabulary: int,
    build: Callable[[Path], tuple[int, Mapping[str, Any]]],
) -> Built:
    """Return the array of a digest, building it where there is no complete one.

    `build` writes it to a path, and returns its length and facts, as JSON, about it. Raises
    ConfigError, and leaves nothing behind, where it does.
    """
    folder = root / digest
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_directory(folder)
    except RunError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        raise ConfigError(
            f"{error} for the tokens: set run.dir or data.cache to a place that can be written"
        ) from error
    with _locked(folder):
        found = find_built(root, digest, vocabulary)
        if found is not None:
            return found
        try:
            return _build(folder, vocabulary, build)
        except ConfigError:
            _undo(folder, made)
            raise
        except RunError:
            shutil.rmtree(folder / "tokens", ignore_errors=True)  # the disk may be full of them
            raise


def find_built(root: Path, digest: str, vocabulary: int) -> Built | None:
    """Return the array that an earlier start left; None where there is none."""
    folder = root / digest
    try:
        facts = read_json(folder / "complete", _MOST_BYTES)
        length = facts["tokens"]
        if type(length) is not int or not 0 < length < 2**48:
            raise ValueError(f"it says {length!r} tokens")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'complete'} is damaged ({error}): delete {folder}") from error
    array = TokenArray(folder / "tokens", length, vocabulary)
    return Built(array, facts) if array.is_whole() else None


def _build(
    folder: Path, vocabulary: int, build: Callable[[Path], tuple[int, Mapping[str, Any]]]
) -> Built:
    if (folder / "complete").exists():
        (folder / "complete").unlink()
        flush_directory(folder)  # a power failure must not bring it back over half of the tokens
    shutil.rmtree(folder / "tokens", ignore_errors=True)
    length, facts = build(folder / "tokens")
    facts = {"tokens": length, **facts}
    write_aside(folder / "complete", json.dumps(facts).encode())
    return Built(TokenArray(folder / "tokens", length, vocabulary), facts)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the directory's lock; another run that builds the same tokens is waited for."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _undo(folder: Path, made: list[Path]) -> None:
    """Remove what refused data left: the tokens, and the directories that are new."""
    shutil.rmtree(folder / "tokens", ignore_errors=True)
    if folder in made:
        shutil.rmtree(folder, ignore_errors=True)
    for path in made[1:]:
        if any(path.iterdir()):
            return
        path.rmdir()
