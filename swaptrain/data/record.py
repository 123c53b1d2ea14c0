"""What a run's data was when it began: kept beside it, compared at every start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from swaptrain.data.corpus import CorpusFile, changed_files
from swaptrain.data.sketches import is_alike
from swaptrain.errors import ConfigError
from swaptrain.store.disk.durable_files import make_directory, run_error, write_aside
from swaptrain.strict_json import read_json

__all__ = ["DataRecord", "RunRecord"]

_NAMED_FILES = 5
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class DataRecord:
    """The digest of the data, that of the tokenizer alone, and the files in their order.

    For files of ids the second one says how raw ids are stored, where that is not uint16.
    """

    digest: str
    tokenizer_digest: str = ""
    files: tuple[CorpusFile, ...] = ()
    items: int = 0
    """Of one epoch; 0 where that is not recorded."""
    sketches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of a few items by their number: what `sketch` says of them, to tell other content."""


class RunRecord:
    """The file in a run directory that holds its DataRecord.

    With `refuse`, other data than the recorded is an error and so is a record that cannot be read;
    without, the new data takes its place. Raises ConfigError.
    """

    def __init__(self, path: Path, *, refuse: bool) -> None:
        self.path, self._refuse = path, refuse
        self._earlier = self._read()

    @property
    def known(self) -> Mapping[str, CorpusFile]:
        """The recorded files by path: those that look unchanged need not be read again."""
        return {file.path: file for file in self._earlier.files} if self._earlier else {}

    @property
    def tokenizer_digest(self) -> str:
        """Of the recorded data; empty where there is none."""
        return self._earlier.tokenizer_digest if self._earlier else ""

    @property
    def items(self) -> int:
        """Items of an epoch of the recorded data; 0 where that is not known."""
        return self._earlier.items if self._earlier else 0

    @property
    def is_there(self) -> bool:
        """Whether there is a record that can be read."""
        return self._earlier is not None

    def check(self, data: DataRecord) -> None:
        """Raise ConfigError, naming what changed, if the run began with other data."""
        earlier = self._earlier
        if not self._refuse or earlier is None:
            return
        if earlier.digest == data.digest:
            self._check_content(earlier, data)
            return
        lines = changed_files(earlier.files, data.files)
        if earlier.tokenizer_digest != data.tokenizer_digest:
            raw = any(file.largest_id >= 0 for file in data.files)
            what = "data.token_dtype" if raw else "the tokenizer (its chat template counts)"
            lines.insert(0, f"{what} has changed")
        if not lines and data.files:
            lines.append("the order of the files has changed")
        if not lines:
            lines.append("the dataset's length, keys, shapes or dtypes have changed")
        shown = "\n  ".join(lines[:_NAMED_FILES])
        more = len(lines) - _NAMED_FILES
        raise ConfigError(
            f"the data is not what this run began with (recorded in {self.path}):\n  {shown}"
            + (f"\n  and {more} more" if more > 0 else "")
            + "\nrestore it to go on, or start over with --fresh"
        )

    def _check_content(self, earlier: DataRecord, data: DataRecord) -> None:
        for number, now in data.sketches.items():
            before = earlier.sketches.get(number, {})
            others = [key for key in before if not is_alike(before[key], now.get(key))]
            if others:
                raise ConfigError(
                    f"the data is not what this run began with (recorded in {self.path}): item "
                    f"{number} has other values in {', '.join(others)}\n"
                    "restore it to go on, or start over with --fresh"
                )

    def keep(self, data: DataRecord) -> None:
        """Write the record durably, unless it is there already."""
        if self._earlier == data:
            return
        content = {
            "digest": data.digest,
            "tokenizer_digest": data.tokenizer_digest,
            "files": [astuple(file) for file in data.files],
            "items": data.items,
            "sketches": data.sketches,
        }
        make_directory(self.path.parent)
        write_aside(self.path, json.dumps(content).encode())
        self._earlier = data

    def _read(self) -> DataRecord | None:
        try:
            content = read_json(self.path, _MOST_BYTES)
            files = tuple(_file(fields) for fields in content["files"])
            texts = content["digest"], content["tokenizer_digest"]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a digest is not text")
            items = content.get("items", 0)
            if type(items) is not int or items < 0:
                raise TypeError("the number of items is none")
            found = dict(content.get("sketches", {}))
            kept = {number: dict(of_item) for number, of_item in found.items()}
            return DataRecord(*texts, files, items, kept)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise run_error(error, self.path, "read") from error
        except (ValueError, KeyError, TypeError) as error:
            if not self._refuse:
                return None
            raise ConfigError(
                f"{self.path}, the record of the run's data, cannot be read"
                f" ({type(error).__name__}: {error}): restore it, or start over with --fresh"
            ) from error


def _file(fields: list[Any]) -> CorpusFile:
    """Return a file of a record; raises TypeError for fields of other kinds."""
    file = CorpusFile(*fields)
    kinds = [str, int, int, str, int]
    if [type(field) for field in astuple(file)] != kinds:
        raise TypeError("a file has fields of other kinds")
    return file
