"""Event files of TensorBoard: each row as one event, whose scalars have the names of the row."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swaptrain.observe.scalars import scalars
from swaptrain.observe.step_metrics import time_stamp

__all__ = ["TensorboardEvents"]

_FILES = "events.out.tfevents."
"""TensorBoard takes what has this in its name, in the order of the names."""
_FIRST = 2
"""Records of a file before its rows: the version of the format, and the start."""


class TensorboardEvents:
    """A file for each start that reports; its first event voids what earlier files have from there.

    That is TensorBoard's own rule for a run that was resumed (`SessionLog.START`). The library's
    writer of files is not used: it imports TensorFlow where that is installed.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, done: int) -> int:
        """Return the last step that is in the files, or `done` where they have later ones."""
        for path in reversed(self._files()):
            record = _last_row(path)
            if record is not None:
                from tensorboard.compat.proto.event_pb2 import Event

                return min(int(Event.FromString(record).step), done)
        return 0

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a row as one event, at the time when its step ended; raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._begin_file(rows[0]["step"])
        for row in rows:
            values = [Summary.Value(tag=k, simple_value=v) for k, v in scalars(row).items()]
            event = Event(step=row["step"], summary=Summary(value=values))
            event.wall_time = row.get("ended_at") or 0.0
            self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def _begin_file(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(exist_ok=True)
        now = time_stamp()
        stamps = [path.name.removeprefix(_FILES).partition(".")[0] for path in self._files()]
        # After all others by its name, also where the clock was set back.
        stamp = max([int(now), *(int(s) + 1 for s in stamps if s.isdecimal())])
        name = f"{_FILES}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._writer = RecordWriter((self._folder / name).open("xb"))
        start = SessionLog(status=SessionLog.START)
        for event in (
            Event(wall_time=now, file_version="brain.Event:2"),
            Event(wall_time=now, step=step, session_log=start),
        ):
            self._writer.write(event.SerializeToString())

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_FILES}*"))


def _last_row(path: Path) -> bytes | None:
    """Return the last whole record after the first two; None where there is none.

    A record is its length in 8 bytes, a checksum of that in 4, the data, and its checksum in 4.
    """
    end, found, count = path.stat().st_size, (0, 0), 0
    with path.open("rb") as file:
        place = 0
        while place + 12 <= end:
            file.seek(place)
            (length,) = struct.unpack("<Q", file.read(8))
            if place + 16 + length > end:
                break  # torn by a kill
            found, count = (place + 12, length), count + 1
            place += 16 + length
        if count <= _FIRST:
            return None
        file.seek(found[0])
        return file.read(found[1])
