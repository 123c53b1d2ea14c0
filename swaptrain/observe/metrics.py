"""metrics.jsonl: one JSON object for each step, on disk when the step counts as done."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swaptrain.errors import RunError
from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.store.disk.durable_files import (
    disk_errors,
    flush_directory,
    read_whole,
    reserve_beyond,
)
from swaptrain.strict_json import parse_json

__all__ = ["MetricsFile", "StepMetrics", "figures", "read_rows", "written_bytes"]

_PIECE_BYTES = 2**16
_LINE_BYTES = 512  # the numbers of a step, written out, take about 450
_MOST_RESERVED_BYTES = 64 << 20
_LONGEST_BYTES = 2**20
"""Of a line: rows have some hundred bytes."""


def written_bytes(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes that the steps of these rows have written."""
    found = (row.get("write_bytes") for row in rows)
    return sum(nbytes for nbytes in found if isinstance(nbytes, int))


def figures(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the numbers that rows have under a key; null and what is no number are left out."""
    found = (row.get(key) for row in rows)
    return [float(value) for value in found if isinstance(value, int | float)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that may be written to meanwhile; none where it is not there.

    Raises RunError for a line that is no row.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(parse_json(line))
            _step(rows[-1])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"line {number} of {path} is not a step's row ({error})") from error
    return rows


class MetricsFile:
    """The rows of a run, appended in the order of their steps; each step appears once.

    Opening creates the file if need be and cuts a last line that a crash left torn or garbled.
    Raises RunError where the disk refuses or a row is not what it should be. Use it in a `with`
    block, or `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reserved_bytes = 0
        with disk_errors(path, "open"):
            is_new = not path.exists()
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if is_new:
                flush_directory(path.parent)
            with disk_errors(path, "read"):
                self._cut_torn_line()
                self._last_step = max((_step(row) for row in self.rows()), default=None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; once is enough, more does no harm."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def last_step(self) -> int | None:
        """Return the step of the last row, None if there is none."""
        return self._last_step

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows from the first on; null stands for a number that was not finite."""
        for row, _ in self._lines():
            yield row

    def _lines(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the rows with the bytes of their lines; raises RunError for one that is none."""
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_BYTES), b""), 1):
                try:
                    row = parse_json(line)
                    _step(row)
                except (ValueError, KeyError, TypeError) as error:
                    raise RunError(
                        f"line {number} of {self.path} is not a step's row ({error}): delete the"
                        " line; nothing else depends on it"
                    ) from error
                yield row, len(line)

    def reserve(self, steps: int) -> None:
        """Reserve room for the lines of `steps` more steps, so that a full disk does not stop them.

        Does nothing where the file system cannot. Raises RunError when there is no room.
        """
        self._reserved_bytes = min(steps * _LINE_BYTES, _MOST_RESERVED_BYTES)
        self._reserve()

    def _reserve(self) -> None:
        with disk_errors(self.path, "reserve", self._reserved_bytes):
            reserve_beyond(self._handle, self._reserved_bytes)

    def give_back(self) -> None:
        """Free what was reserved and is not used: the run is finished."""
        self._reserved_bytes = 0
        with disk_errors(self.path, "cut"):
            os.ftruncate(self._handle, os.fstat(self._handle).st_size)

    def append(self, metrics: Mapping[str, Any] | StepMetrics) -> None:
        """Write a row and flush it; raises RunError for a step that is not after the last one."""
        row = metrics.row() if isinstance(metrics, StepMetrics) else dict(metrics)
        step = _step(row)
        if self._last_step is not None and step <= self._last_step:
            raise RunError(
                f"step {step} cannot be added to {self.path}, whose last step is {self._last_step}:"
                " each step appears once; cut the file after the last committed step first"
            )
        line = json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        # A crash or an error tears at most this line, which the next open cuts.
        with disk_errors(self.path, "write", len(line)):
            while line:
                line = line[os.write(self._handle, line) :]
        self.sync()
        self._last_step = step

    def cut_after(self, step: int) -> None:
        """Remove the rows of later steps, which a crash took back, and flush."""
        keep_bytes = 0
        last_step = None
        with disk_errors(self.path, "cut"):
            for found, line_bytes in self._lines():
                if _step(found) > step:
                    break
                keep_bytes += line_bytes
                last_step = _step(found)
            if keep_bytes < os.fstat(self._handle).st_size:
                os.ftruncate(self._handle, keep_bytes)
                self._reserve()
        self.sync()
        self._last_step = last_step

    def sync(self) -> None:
        """Flush what was written; raises RunError."""
        with disk_errors(self.path, "flush"):
            os.fdatasync(self._handle)

    def _cut_torn_line(self) -> None:
        """Drop what follows the last newline, and a last line of which only the end was written.

        Every line is flushed before the next one is appended: no other can be torn. The pages of
        a line that lies across two reach the disk in any order.
        """
        size = os.fstat(self._handle).st_size
        end = self._whole_end(size)
        if end < size:  # looked at twice: a disk that errs once must not cost a line
            end = max(end, self._whole_end(size))
        if end < size:
            os.ftruncate(self._handle, end)
            self.sync()

    def _whole_end(self, size: int) -> int:
        """Return where the last whole line ends."""
        end = self._line_begin(size)
        if end > 0:
            begin = self._line_begin(end - 1)
            try:
                json.loads(read_whole(self._handle, end - begin, begin))
            except ValueError:
                end = begin
        return end

    def _line_begin(self, end: int) -> int:
        """Return where what follows the last newline before `end` begins, reading backwards."""
        begin = end
        while begin > 0:
            size = min(_PIECE_BYTES, begin)
            begin -= size
            newline = read_whole(self._handle, size, begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
        return 0


def _step(row: Mapping[str, Any]) -> int:
    step = row["step"]
    if type(step) is not int or not 0 < step < 2**63:
        raise TypeError(f"step is {step!r}")
    return step


def _finite(value: Any) -> Any:
    """Return the value with null for each float that JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
