"""The files of a corpus: which they are, what they hold, and which of them changed since."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from swaptrain.data.globs import GlobError, kind_of, matches
from swaptrain.errors import ConfigError

__all__ = [
    "CorpusFile",
    "changed_files",
    "corpus_digest",
    "find_files",
    "hash_files",
    "read_pieces",
    "stat_file",
]

_PIECE_BYTES = 2**20
# Text that every machine has: the sources of the standard library of the Python that runs. A
# virtual environment holds no copy of them, so no relative glob can reach them.
_STDLIB = "{stdlib}"


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file, or one directory that holds a zarr array, as it was when it was read."""

    path: str
    """Absolute."""
    size_bytes: int
    modified_ns: int
    content: str = ""
    """xxh3-128 of the bytes; empty until they have been read."""
    largest_id: int = -1
    """The largest token id in it, for files that hold ids."""

    def looks_like(self, other: CorpusFile) -> bool:
        """Tell whether path, size and time are the same, so that the bytes need not be read."""
        return (self.path, self.size_bytes, self.modified_ns) == (
            other.path,
            other.size_bytes,
            other.modified_ns,
        )


def find_files(
    patterns: Sequence[str | Path],
    *,
    key: str,
    directories: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> list[CorpusFile]:
    """Return the files that the globs match, each once, with sizes and times; nothing is read.

    `**` matches any number of directories; a pattern that is the name of a file is that file; a
    leading `{stdlib}` is the directory of Python's standard library. Text (no `directories`) comes
    sorted by absolute path; with `directories` (zarr arrays count) the order of the patterns is
    kept. Of several names of one file one counts, and `note` hears of the others. Raises
    ConfigError for patterns that match nothing, and for what is no file.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        expanded = str(pattern)
        if expanded.startswith(_STDLIB):
            expanded = glob.escape(sysconfig.get_paths()["stdlib"]) + expanded[len(_STDLIB) :]
        try:
            names = [expanded] if os.path.exists(expanded) else matches(expanded)
        except GlobError as error:
            raise ConfigError(f"{key}: {error}") from error
        usable = [name for name in names if directories or not os.path.isdir(name)]
        if not usable:
            hint = (
                f"it matches only directories, did you mean {os.path.join(str(pattern), '**/*')}?"
                if names
                else f"relative paths start at the current directory, {os.getcwd()}"
            )
            raise ConfigError(f"{key}: no file matches {str(pattern)!r}: {hint}")
        found.update((os.path.abspath(name), None) for name in usable)
    if not found:
        raise ConfigError(f"{key}: the list is empty: name at least one file")
    return _each_once(list(found) if directories else sorted(found), key, note)


def _each_once(names: list[str], key: str, note: Callable[[str], None]) -> list[CorpusFile]:
    """Return the files in the order of `names`, without second names of one.

    Of several names the one counts that leads through no link, else the first.
    """
    files = [stat_file(name, key) for name in names]
    named: dict[tuple[int, int], list[str]] = {}
    for name in names:
        status = os.stat(name)
        named.setdefault((status.st_dev, status.st_ino), []).append(name)
    left_out: dict[str, str] = {}
    for same in named.values():
        if len(same) > 1:
            chosen = next((name for name in same if os.path.realpath(name) == name), same[0])
            left_out.update((name, chosen) for name in same if name != chosen)
    if left_out:
        name, chosen = next(iter(left_out.items()))
        note(
            f"{key}: {len(left_out):,} of {len(names):,} names lead to a file that another name "
            f"leads to, and each file is taken once ({name} is {chosen})"
        )
    return [file for file in files if file.path not in left_out]


def stat_file(path: str, key: str) -> CorpusFile:
    """Return a file's size and time; for a directory the sum and the latest of its files'.

    Raises ConfigError for what cannot be read as a file: a pipe would be waited for without end.
    """
    size_bytes, modified_ns = 0, 0
    try:
        for name in _files_of(path):
            status = os.stat(name)
            if (kind := kind_of(status)) is not None:
                raise ConfigError(
                    f"{key}: {name} is {kind}, no file: leave it out, or write what it gives to a "
                    "file"
                )
            size_bytes += status.st_size
            modified_ns = max(modified_ns, status.st_mtime_ns)
    except OSError as error:
        why = error.strerror
        if os.path.islink(path) and not os.path.exists(path):
            why = f"it is a link to {os.readlink(path)}, which leads to no file ({why})"
        raise ConfigError(
            f"{key}: cannot read {path}: {why}: restore it, or leave it out"
        ) from error
    return CorpusFile(path, size_bytes, modified_ns)


def _files_of(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    entered: set[tuple[int, int]] = set()
    for directory, subdirectories, names in os.walk(path, followlinks=True, onerror=_raise):
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in entered:  # a link leads to what was read already
            subdirectories.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        subdirectories.sort()
        for name in sorted(names):
            yield os.path.join(directory, name)


def _raise(error: OSError) -> None:
    raise error


def hash_files(
    files: Iterable[CorpusFile], known: Mapping[str, CorpusFile], *, key: str
) -> list[CorpusFile]:
    """Return the files with the digests of their bytes, reading only those that look new.

    `known` holds earlier records by path; one whose size and time still agree is believed.
    """
    hashed = []
    for file in files:
        earlier = known.get(file.path)
        if earlier is not None and earlier.content and earlier.looks_like(file):
            hashed.append(earlier)
            continue
        state = xxhash.xxh3_128()
        for piece in read_pieces(file.path, key):
            state.update(piece)
        hashed.append(replace(file, content=state.hexdigest()))
    return hashed


def read_pieces(path: str, key: str) -> Iterator[bytes]:
    """Yield the bytes of a file (or of a directory's files, names included) by 1 MiB."""
    try:
        for name in _files_of(path):
            if name != path:
                yield os.path.relpath(name, path).encode(errors="surrogateescape")
            with open(name, "rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error


def corpus_digest(files: Iterable[CorpusFile], tokenizer_digest: str) -> str:
    """Return the xxh3-128 of the files' contents in their order, and of the tokenizer.

    Names are left out: a corpus that was moved as a whole is still the same corpus.
    """
    state = xxhash.xxh3_128(tokenizer_digest.encode())
    for file in files:
        state.update(f"\n{file.content} {file.size_bytes}".encode())
    return state.hexdigest()


def changed_files(old: Iterable[CorpusFile], new: Iterable[CorpusFile]) -> list[str]:
    """Return one line for each file that is new, gone or different (contents compared)."""
    before = {file.path: file.content for file in old}
    after = {file.path: file.content for file in new}
    lines = []
    for path in sorted(before.keys() | after.keys()):
        if path not in after:
            lines.append(f"{path} is gone")
        elif path not in before:
            lines.append(f"{path} is new")
        elif before[path] != after[path]:
            lines.append(f"{path} has changed")
    return lines
