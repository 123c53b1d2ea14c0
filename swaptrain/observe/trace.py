"""trace.json: what every thread of a run did when, in Chrome's trace event format."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.spans import Recorder, Span

__all__ = ["TraceFile"]

_MOST_HELD = 4_000
"""Spans in memory, of 170 bytes each and what they are about."""
_STEPS = 0
"""The track of the steps themselves; threads are counted from 1."""


class TraceFile:
    """Writes what happens in the next `steps` steps; ui.perfetto.dev and chrome://tracing show it.

    The file is whole behind each step, and one of an earlier start is replaced. It is for a person
    to read, so where it cannot be written the run goes on without it, and `note` says so. The
    format: "Trace Event Format", complete events ("ph": "X"), times in microseconds.
    """

    def __init__(self, path: Path, steps: int, note: Callable[[str], None]) -> None:
        self._path, self._left, self._note = path, steps, note
        self._recorder = Recorder()
        self._began_ns = time.perf_counter_ns()
        self._threads: dict[str, int] = {}
        self._end = 0
        """Bytes of the file before the bracket that closes it."""

    def instruction_begins(self) -> None:
        """Write what was recorded, if that is much: a step may have many instructions."""
        if len(self._recorder) > _MOST_HELD:
            self._write(self._events(self._recorder.take()))

    def step_done(self, metrics: StepMetrics) -> None:
        """Write what was recorded of a step; behind the last one record no more."""
        if not self._left:
            return
        self._left -= 1
        now_ns = time.perf_counter_ns()
        step = _event(
            f"step {metrics.step}",
            _STEPS,
            now_ns - self._began_ns - int(metrics.step_s * 1e9),
            int(metrics.step_s * 1e9),
            {
                key: value
                for key, value in metrics.row().items()
                if isinstance(value, int | float) and math.isfinite(value)
            },
        )
        self._write([*self._events(self._recorder.take()), step])
        if not self._left:
            self.close()

    def close(self) -> None:
        """Record no more; once is enough, more does no harm."""
        self._left = 0
        self._recorder.close()

    def _events(self, spans: list[Span]) -> Iterator[dict[str, Any]]:
        if not self._threads:
            yield _name("process_name", _STEPS, "swaptrain")
            yield _name("thread_name", _STEPS, "steps")
        for span in spans:
            thread = self._threads.get(span.thread)
            if thread is None:
                thread = self._threads[span.thread] = len(self._threads) + 1
                yield _name("thread_name", thread, span.thread)
            about: dict[str, Any] = {}
            if span.about is not None:
                about["of"] = str(span.about).removeprefix(f"{self._path.parent}/")
            if span.nbytes:
                about["bytes"] = span.nbytes
            begin_ns = span.begin_ns - self._began_ns
            yield _event(span.name, thread, begin_ns, span.end_ns - span.begin_ns, about)

    def _write(self, events: list[dict[str, Any]] | Iterator[dict[str, Any]]) -> None:
        """Add events to the file, which is a list in JSON before and after it."""
        lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
        if not lines:
            return
        added = (",\n" if self._end else "[\n").encode() + lines.encode()
        try:
            with self._path.open("r+b" if self._end else "wb") as file:
                file.seek(self._end)
                file.write(added + b"\n]\n")
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            self._note(f"{self._path} cannot be written ({reason}): the run goes on without it")
            self.close()
        self._end += len(added)


def _event(
    name: str, thread: int, begin_ns: int, took_ns: int, about: dict[str, Any]
) -> dict[str, Any]:
    event = {"name": name, "ph": "X", "pid": 1, "tid": thread}
    event |= {"ts": begin_ns / 1000, "dur": took_ns / 1000}
    return event | {"args": about} if about else event


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
