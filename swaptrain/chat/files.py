"""The rows of a file, one at a time: JSON Lines, JSON, CSV, Parquet, and saved `datasets`.

A row travels as the bytes of its JSON object: what a line of JSON Lines is already.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swaptrain.chat.refusal import RowError, refused
from swaptrain.errors import ConfigError
from swaptrain.strict_json import parse_json
from swaptrain.units import MIB, format_size

__all__ = ["SUFFIXES", "read_rows"]

_MOST_LINE_BYTES = 64 * MIB
_MOST_JSON_BYTES = 256 * MIB
"""Of a file that is read as a whole."""
_MARK = b"\xef\xbb\xbf"
_BATCH_ROWS = 256
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def read_rows(path: str, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the place of each row, such as `line 7`, and the row as JSON.

    Raises ConfigError, with the place, for what cannot be read.
    """
    file, suffix = Path(path), Path(path).suffix.lower()
    try:
        if file.is_dir():
            yield from _saved_dataset(file, key)
        elif suffix in (".jsonl", ".ndjson"):
            yield from _lines(file, key)
        elif suffix == ".json":
            yield from _json(file, key)
        elif suffix in (".csv", ".tsv"):
            yield from _csv(file, key, "\t" if suffix == ".tsv" else ",")
        elif suffix == ".parquet":
            yield from _parquet(file, key)
        elif suffix == ".arrow":
            yield from _arrow(file, key, 0)
        else:
            known = ", ".join(SUFFIXES)
            raise refused(
                key,
                path,
                "",
                f"what it holds does not show in its name: rename it so that it ends in one of "
                f"{known}; compressed files have to be unpacked first",
            )
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror or error}") from error


def _lines(file: Path, key: str) -> Iterator[tuple[str, bytes]]:
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(_MOST_LINE_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(_MARK)
            if len(line) > _MOST_LINE_BYTES:
                raise refused(
                    key, str(file), f"line {number}",
                    f"it is longer than {format_size(_MOST_LINE_BYTES)}: give one row a line",
                )  # fmt: skip
            if line.strip():
                yield f"line {number}", line


def _json(file: Path, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the rows of an array; a file whose first line is an object is taken as JSON Lines."""
    with file.open("rb") as stream:
        beginning = stream.read(2**16).removeprefix(_MARK).lstrip()
    if beginning.startswith(b"{"):
        first, newline, _ = beginning.partition(b"\n")
        try:
            parse_json(first)
        except ValueError:
            if newline:
                raise refused(
                    key, str(file), "",
                    "it holds one object: write a list of rows, or one row a line",
                ) from None  # fmt: skip
        yield from _lines(file, key)
        return
    size_bytes = file.stat().st_size
    if size_bytes > _MOST_JSON_BYTES:
        raise refused(
            key, str(file), "",
            f"a JSON file is read as a whole, and this one has {format_size(size_bytes)} of at "
            f"most {format_size(_MOST_JSON_BYTES)}: write one row a line, such as with jq -c '.[]'",
        )  # fmt: skip
    try:
        rows = parse_json(file.read_bytes().removeprefix(_MARK))
    except ValueError as error:
        raise refused(key, str(file), "", f"it is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise refused(key, str(file), "", "it holds no list of rows: write one row a line")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", json.dumps(row).encode()


def _csv(file: Path, key: str, delimiter: str) -> Iterator[tuple[str, bytes]]:
    csv.field_size_limit(_MOST_LINE_BYTES)
    with file.open("rb") as raw:
        stream = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise RowError("it has another number of columns than the first line")
                yield f"line {reader.line_num}", json.dumps(row).encode()
        except (csv.Error, UnicodeDecodeError, RowError) as error:
            raise refused(key, str(file), f"line {reader.line_num}", error) from error


def _parquet(file: Path, key: str) -> Iterator[tuple[str, bytes]]:
    pyarrow = _pyarrow(key, file)
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _as_json(row, key, file, number)
    except pyarrow.ArrowException as error:
        raise refused(key, str(file), f"row {number + 1}", f"it is damaged: {error}") from error


def _saved_dataset(directory: Path, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the rows of a directory that `Dataset.save_to_disk` wrote."""
    state = directory / "state.json"
    if not state.is_file():
        splits = sorted(path.parent.name for path in directory.glob("*/state.json"))
        advice = (
            f"name one of its splits: {', '.join(splits)}"
            if splits
            else "it is no dataset that save_to_disk wrote (it has no state.json): name its files"
        )
        raise refused(key, str(directory), "", advice)
    try:
        names = [entry["filename"] for entry in parse_json(state.read_bytes())["_data_files"]]
        if any("/" in name or name.startswith(".") for name in names):
            raise ValueError("it names files outside of its directory")
    except (ValueError, KeyError, TypeError) as error:
        raise refused(key, str(state), "", f"it is damaged: {error}") from error
    rows = 0
    for name in names:
        for place, row in _arrow(directory / name, key, rows):
            rows += 1
            yield place, row


def _arrow(file: Path, key: str, before: int) -> Iterator[tuple[str, bytes]]:
    """Yield the rows of a stream of Arrow batches; `before` counts those of earlier files."""
    pyarrow = _pyarrow(key, file)
    number = before
    try:
        with file.open("rb") as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _as_json(row, key, file, number)
    except pyarrow.ArrowException as error:
        raise refused(key, str(file), f"row {number + 1}", f"it is damaged: {error}") from error


def _as_json(row: dict[str, Any], key: str, file: Path, number: int) -> bytes:
    try:
        return json.dumps(row, allow_nan=False, default=_not_json).encode()
    except (TypeError, ValueError) as error:
        raise refused(key, str(file), f"row {number}", error) from error


def _not_json(value: object) -> object:
    if isinstance(value, bytes):
        return {"bytes": len(value)}  # of a picture, say: refused where it is part of a message
    return str(value)


def _pyarrow(key: str, file: Path) -> Any:
    """Return pyarrow with the modules that are used here; raises ConfigError without it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{key}: {file} needs pyarrow: pip install 'swaptrain[data]'; JSON Lines needs nothing"
        ) from error
    return pyarrow
