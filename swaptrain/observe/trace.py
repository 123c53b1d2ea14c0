"""trace.json: what every thread of a run did when, in Chrome's trace event format."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from swaptrain.spans import Recorder, Span, span

__all__ = ["TraceFile"]

_MOST_HELD = 2_000
"""Spans in memory; one of a read or a write, with its path, takes 650 bytes."""
_PIECE = 500
"""Spans that are written at once."""
_CLOSING = b"\n]\n"


class TraceFile:
    """Writes what happens in the next `steps` steps; ui.perfetto.dev and chrome://tracing show it.

    The file is whole after each step, and one of an earlier start is replaced. It is for a person
    to read, so where it cannot be written the run goes on without it, and `note` says so. The
    format: "Trace Event Format", complete events ("ph": "X"), times in microseconds.
    """

    def __init__(self, path: Path, steps: int, note: Callable[[str], None]) -> None:
        self._path, self._steps, self._note = path, steps, note
        self._done = 0
        self._folders = [f"{folder}/" for folder in (path.parent.absolute(), path.parent)]
        self._recorder = Recorder()
        self._began_ns = time.perf_counter_ns()
        self._threads: dict[str, int] = {}
        self._end = 0
        """Bytes of the file before the bracket that closes it."""
        self._failed = False

    def instruction_begins(self) -> None:
        """Write what was recorded, if that is much: a step may have many instructions."""
        if len(self._recorder) > _MOST_HELD:
            self._write()

    def step_done(self) -> None:
        """Write what was recorded of a step; after the last one record no more."""
        if self._done == self._steps:
            return
        self._done += 1
        if self._done == self._steps:
            self._recorder.close()
        self._write()
        if self._done == self._steps and not self._failed:
            self._note(f"{self._path} has {_count(self._steps)}: ui.perfetto.dev shows it")

    def close(self) -> None:
        """Record no more, and write what is left: of a step that has not ended, and commits."""
        self._recorder.close()
        self._write()
        self._done = self._steps

    def _write(self) -> None:
        """Add what was recorded to the file, which is a list in JSON before and after it."""
        spans = self._recorder.take()
        if self._failed or not spans:
            return
        try:
            with span("write the trace"), self._path.open("r+b" if self._end else "wb") as file:
                lines = (json.dumps(event, allow_nan=False) for event in self._events(spans))
                while piece := ",\n".join(islice(lines, _PIECE)):
                    added = (",\n" if self._end else "[\n").encode() + piece.encode()
                    file.seek(self._end)
                    file.write(added + _CLOSING)
                    file.flush()
                    self._end += len(added)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Record no more; cut off what was written in part."""
        self._failed = True
        self._recorder.close()
        with suppress(OSError), self._path.open("r+b") as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(_CLOSING if self._end else b"[]\n")
        reason = os.strerror(error.errno) if error.errno else str(error)
        self._note(f"{self._path} cannot be written ({reason}): the run goes on without it")

    def _events(self, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
        if not self._threads:
            yield _name("process_name", 0, "swaptrain")
        for found in spans:
            thread = self._threads.get(found.thread)
            if thread is None:
                thread = self._threads[found.thread] = len(self._threads) + 1
                yield _name("thread_name", thread, found.thread)
            event = {"name": found.name, "ph": "X", "pid": 1, "tid": thread}
            event["ts"] = (found.begin_ns - self._began_ns) / 1000
            event["dur"] = (found.end_ns - found.begin_ns) / 1000
            about: dict[str, Any] = {}
            if found.about is not None:
                about["of"] = self._shown(str(found.about))
            if found.nbytes:
                about["bytes"] = found.nbytes
            yield event | {"args": about} if about else event

    def _shown(self, about: str) -> str:
        """Return a path in the run directory as one that begins there."""
        for folder in self._folders:
            about = about.removeprefix(folder)
        return about


def _count(steps: int) -> str:
    return "one step" if steps == 1 else f"{steps} steps"


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
