"""metrics.jsonl: one JSON object for each step, on disk when the step counts as done."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swaptrain.errors import RunError
from swaptrain.observe.step_metrics import StepMetrics

__all__ = ["MetricsFile", "StepMetrics"]

_PIECE_BYTES = 2**16


class MetricsFile:
    """The rows of a run, appended in the order of their steps; each step appears once.

    Opening creates the file if need be and cuts a last line that a crash left torn. Raises RunError
    where the disk refuses or a row is not what it should be. Use it in a `with` block, or `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_new = not path.exists()
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if is_new:
                directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        except OSError as error:
            raise RunError(f"cannot open {path}: {error.strerror}") from error
        try:
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
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = json.loads(line)
                    _step(row)
                except (ValueError, KeyError, TypeError) as error:
                    raise RunError(
                        f"line {number} of {self.path} is not a step's row ({error}): delete the"
                        " line; nothing else depends on it"
                    ) from error
                yield row

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
        # One write: a crash tears at most this line, which the next open cuts.
        try:
            written = os.write(self._handle, line)
            if written != len(line):
                raise OSError(0, f"{written} of {len(line)} bytes written, the disk may be full")
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from error
        self.sync()
        self._last_step = step

    def cut_after(self, step: int) -> None:
        """Remove the rows of later steps, which a crash took back, and flush."""
        keep_bytes = 0
        last_step = None
        with self.path.open("rb") as file:
            for line in file:
                found = _step(json.loads(line))
                if found > step:
                    break
                keep_bytes += len(line)
                last_step = found
        try:
            os.ftruncate(self._handle, keep_bytes)
        except OSError as error:
            raise RunError(f"cannot cut {self.path}: {error.strerror}") from error
        self.sync()
        self._last_step = last_step

    def sync(self) -> None:
        """Flush what was written; raises RunError."""
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            raise RunError(f"cannot flush {self.path}: {error.strerror}") from error

    def _cut_torn_line(self) -> None:
        """Drop what follows the last newline, reading backwards from the end."""
        end = os.fstat(self._handle).st_size
        begin = end
        while begin > 0:
            begin = max(0, begin - _PIECE_BYTES)
            newline = os.pread(self._handle, min(_PIECE_BYTES, end - begin), begin).rfind(b"\n")
            if newline >= 0:
                begin += newline + 1
                break
        if begin < end:
            os.ftruncate(self._handle, begin)
            self.sync()


def _step(row: Mapping[str, Any]) -> int:
    step = row["step"]
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"step is {step!r}")
    return step


def _finite(value: Any) -> Any:
    """Return the value with null for each float that JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
