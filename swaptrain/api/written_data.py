"""Texts and rows of a script become files, under a name of their content."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from swaptrain.config.paths import written_path
from swaptrain.errors import ConfigError
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.paths import ASIDE

__all__ = ["WrittenData", "documents_of", "is_text_rows", "rows_of", "written"]

_MOST_FILES = 10_000
"""Of texts that become documents, each in a file."""
_COLUMNS = ("messages", "conversations", "prompt", "instruction", "text")
"""Columns by which rows are told from tensors."""


@dataclass(frozen=True)
class WrittenData:
    """Files that a config names: one of rows, or a directory with one for each document."""

    path: Path
    files: Mapping[str, bytes]
    """By name in the directory; under the name "" the file itself."""

    @property
    def pattern(self) -> str:
        """The glob of all of them, as a config has to write it."""
        name = written_path(glob.escape(str(self.path)))
        return name if "" in self.files else f"{name}/*.txt"

    def write(self) -> list[Path]:
        """Write what is not there; return what was made, the innermost first."""
        if self.path.exists():
            return []
        made = [self.path, *(path for path in self.path.parents if not path.exists())]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if "" in self.files:
            write_aside(self.path, self.files[""])
            return made
        aside = self.path.with_name(f"{self.path.name}{ASIDE}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name, content in self.files.items():
            (aside / name).write_bytes(content)
        aside.replace(self.path)
        return made


@contextmanager
def written(data: Sequence[WrittenData]) -> Iterator[None]:
    """Let the files be there; where a ConfigError comes out, those that were made are deleted."""
    made: list[Path] = []
    try:
        for one in data:
            made = one.write() + made
        yield
    except ConfigError:
        for path in made:
            if path.is_dir() and not any(path == one.path for one in data):
                with suppress(OSError):  # something else is in it
                    path.rmdir()
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def is_text_rows(data: Any) -> bool:
    """Whether these are texts, or rows that the chat reader takes."""
    columns = getattr(data, "column_names", None)
    if isinstance(columns, list):
        return "input_ids" not in columns and any(name in columns for name in _COLUMNS)
    if not isinstance(data, Sequence) or isinstance(data, str | bytes) or not len(data):
        return False
    first = data[0]
    return isinstance(first, str) or (
        isinstance(first, Mapping)
        and any(isinstance(first.get(name), str | list) for name in _COLUMNS)
    )


def rows_of(rows: Iterable[Any], section: str, folder: Path) -> WrittenData:
    """Return rows as a file of JSON Lines; raises ConfigError with the number of one that is none.

    A text is a row with the one column `text`.
    """
    lines = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, str | Mapping):
            raise ConfigError(
                f"{section}: row {number} is {type(row).__name__}: rows are texts, or dicts"
            )
        value = {"text": row} if isinstance(row, str) else row
        try:
            lines.append(f"{json.dumps(value, ensure_ascii=False)}\n".encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{section}: row {number} is no text or JSON: {error}") from error
    content = b"".join(lines)
    return WrittenData(_named(section, content, folder).with_suffix(".jsonl"), {"": content})


def documents_of(texts: Sequence[Any], section: str, folder: Path) -> WrittenData:
    """Return texts as files, one a document; raises ConfigError with the number of a wrong one."""
    if len(texts) > _MOST_FILES:
        raise ConfigError(
            f"{section}: these are {len(texts):,} texts, and no tokenizer is given: give "
            "tokenizer=DIR, or write them to files and give their glob"
        )
    files = {}
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(
                f"{section}: text {number + 1} is {type(text).__name__}: give texts alone, or "
                "rows alone"
            )
        try:
            files[f"{number:05d}.txt"] = text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{section}: text {number + 1} is no Unicode: {error}") from error
    content = json.dumps(list(texts)).encode()
    return WrittenData(_named(section, content, folder), files)


def _named(section: str, content: bytes, folder: Path) -> Path:
    return folder / f"given-{section}-{xxhash.xxh3_64_hexdigest(content)}"
