"""Datasets that another tool's file names: files of rows, of text, or what has to be fetched."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from swaptrain.chat.files import SUFFIXES, read_rows
from swaptrain.config.commented import shown
from swaptrain.config.paths import written_path
from swaptrain.errors import ConfigError
from swaptrain.migrate.draft import Draft
from swaptrain.strict_json import parse_json

__all__ = ["add_files", "first_columns", "found_files"]

_KINDS = ("json", "csv", "parquet", "arrow", "text")
"""ToolNames of loaders of `datasets`, which take files instead."""
_TEXT = (".txt", ".md", ".text")


def found_files(
    draft: Draft,
    path: str,
    *,
    files: Any = None,
    name: Any = None,
    split: Any = None,
) -> list[str]:
    """Return the files of a dataset; of one on the hub the file that it is to become.

    `files` are those that it names itself, one, several or by split; `name` and `split` what
    `load_dataset` takes. Raises ConfigError.
    """
    split = str(split or "train")
    if isinstance(files, dict):
        files = files.get(split)
    named = [files] if isinstance(files, str) else files or []
    if not isinstance(named, list) or not all(isinstance(file, str) and file for file in named):
        raise draft.given.wrong("data_files", files, "a file or a list of files")
    if "\0" in path or not path:
        raise draft.given.wrong("path", path, "a dataset")
    if named:
        folder = "" if path in _KINDS or not Path(path).is_dir() else f"{path.rstrip('/')}/"
        return [written_path(folder + file) for file in named]
    where = Path(path)
    if where.suffix.lower() in (*SUFFIXES, *_TEXT) or (where / "state.json").is_file():
        return [written_path(path)]
    if where.is_dir():
        for suffix in (*SUFFIXES, *_TEXT):
            if any(where.glob(f"*{suffix}")):
                return [f"{written_path(path.rstrip('/'))}/*{suffix}"]
    parts = [str(part) for part in (path, name, split) if part]
    file = "data/" + re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.") + ".jsonl"
    arguments = ", ".join([repr(path)] + ([repr(name)] if name else []) + [f"split={split!r}"])
    draft.do_first(
        f"{shown(path)} is no file here, and nothing is downloaded: make one.",
        f'python -c "from datasets import load_dataset; load_dataset({arguments})'
        f".to_json('{file}')\"",
    )
    return [file]


def add_files(draft: Draft, section: str, files: list[str]) -> None:
    """Set the files of `data` or `eval`: rows, or text where all of them are. Raises ConfigError.

    Rows need the tokenizer, which has to be set before.
    """
    text = [file for file in files if Path(file).suffix.lower() in _TEXT]
    if text and len(text) < len(files):
        raise ConfigError(
            f"{draft.given.source}: it names plain text ({shown(text[0])}) and rows, and a config "
            "has one kind: write the text as rows with a column text"
        )
    kind = "text" if text else "chat"
    draft.set(f"{section}.{kind}", files)


def first_columns(files: Iterable[str]) -> set[str]:
    """Return the columns of the first row, as far as a file is there and can be read."""
    for file in files:
        try:
            for _, row in islice(read_rows(file, "data.chat"), 1):
                found = parse_json(row)
                return set(found) if isinstance(found, dict) else set()
        except (ConfigError, ValueError):
            continue
    return set()
