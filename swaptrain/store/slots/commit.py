"""The commit of a segment: write, flush, record, switch, in the order that loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from swaptrain.errors import RunError
from swaptrain.spans import span
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.record import write_record
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.slots import Slots

__all__ = ["Checksums", "Committer", "Started", "Write"]


@dataclass(frozen=True)
class Write:
    """One array, or one row of it, and the bytes that are to be written there."""

    array: ArrayFiles
    buffer: memoryview
    row: int | None = None


@dataclass(frozen=True)
class Started:
    """A write that is under way; it does not keep the memory that is written."""

    array: ArrayFiles
    row: int | None
    futures: list[Future[int]]
    """One per chunk, which gives its checksum."""


@dataclass(frozen=True)
class Checksums:
    """The xxh3-64 of every chunk that a commit wrote."""

    arrays: dict[str, list[int]] = field(default_factory=dict)
    """Of the state, by the array's name."""
    handoff: list[list[int]] = field(default_factory=list)
    """Of the hand-off, in the order in which its writes were given."""


class Committer:
    """Makes commits durable one after the other, in the order of submission.

    A commit's writes into its free slot begin before it is submitted. Its hand-off, whose buffer
    is the one before the last, its record and its switch wait until the commit before is durable.
    After an error nothing more is written by later commits or switched: their futures raise it.
    """

    def __init__(self, io: DirectIO, slots: Slots) -> None:
        self._io, self._slots = io, slots
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="swaptrain-commit")
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._pending: set[Future[None]] = set()

    def take(self, shape_class: str) -> Slot:
        """Reserve a free slot, waiting for a commit in flight to free one.

        Raises the error of a commit that failed; RunError when no commit could free one.
        """
        while True:
            self.check()
            with self._lock:
                idle = not self._pending
            slot = self._slots.take(shape_class)
            if slot is not None:
                return slot
            if idle:
                raise RunError(f"no slot of shape class {shape_class} is free")
            self._slots.wait(timeout_s=0.05)

    def check(self) -> None:
        """Raise the error of a commit that failed, if one did."""
        if self._error is not None:
            raise self._error

    def begin(self, writes: Sequence[Write]) -> list[Started]:
        """Begin to write into a slot that `take` gave, and to flush that; for a later `commit`.

        Raises the error of a commit that failed.
        """
        self.check()
        return self._start(writes)

    def commit(
        self,
        segment: int,
        slot: Slot,
        record: Callable[[Checksums], dict[str, Any]],
        states: Sequence[Started],
        handoff_writes: Sequence[Write] = (),
        after: Callable[[], None] | None = None,
        *,
        tree: str | None = None,
        switch: bool = True,
    ) -> Future[None]:
        """Commit `segment` into `slot`, a free one that `take` gave and `begin` writes to.

        `states` are all writes of its arrays, those of each array in their order. `record` makes
        the attributes of the slot's record from the checksums and, like `after`, which is called
        when the switch is durable, runs on the committer's thread. The buffers must not change
        until the future is done: then the commit cannot be lost, or the future raises the error
        (RunError). Without `switch`, the slot is the segment's own one in a tree that is not live
        (with the unit `step`), and only what belongs to it is made durable.
        """

        def finish() -> None:
            self._finish(segment, slot, record, states, handoff_writes, after, tree, switch)

        started = [future for state in states for future in state.futures]
        return self._submit("commit", f"segment {segment}", finish, started)

    def write(
        self,
        record_path: Path,
        record_bytes: int,
        record: Callable[[Checksums], dict[str, Any]],
        writes: Sequence[Write],
        after: Callable[[], None] | None = None,
    ) -> Future[None]:
        """Write arrays in place, flush them, then a record of them: a finished gradient.

        In the same order as the commits. `record` gets the checksums as `handoff`.
        """

        def finish() -> None:
            checksums = [_results(started.futures) for started in self._start(writes)]
            # In place: a record that is torn, or found beside other arrays, counts as absent. Were
            # it first, a power loss could leave a whole record of gradients that were not written.
            with span("write the record"):
                write_record(record_path, record(Checksums(handoff=checksums)), record_bytes)
            if after is not None:
                after()

        return self._submit("finished gradient", record_path, finish)

    def then(self, action: Callable[[], None]) -> Future[None]:
        """Run `action` on the committer's thread once all that was submitted before is durable."""
        return self._submit("then", None, action)

    def drain(self) -> None:
        """Wait until everything submitted is durable; raise the error of what failed."""
        with self._lock:
            pending = list(self._pending)
        wait(pending)
        self.check()

    def close(self) -> None:
        """Finish what was submitted and end the thread; errors stay in the futures."""
        self._executor.shutdown()

    def __enter__(self) -> Committer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, writes: Sequence[Write]) -> list[Started]:
        return [
            Started(w.array, w.row, w.array.write(self._io, w.buffer, row=w.row, flush=True))
            for w in writes
        ]

    def _submit(
        self,
        name: str,
        about: object,
        finish: Callable[[], None],
        started: Sequence[Future[int]] = (),
    ) -> Future[None]:
        def run() -> None:
            with span(name, about):
                try:
                    self.check()
                    finish()
                except BaseException as error:
                    self._error = error
                    raise
                finally:
                    # Whatever happens, no buffer is still being written when the future is done.
                    wait(started)

        future = self._executor.submit(run)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _finish(
        self,
        segment: int,
        slot: Slot,
        record: Callable[[Checksums], dict[str, Any]],
        states: Sequence[Started],
        handoff_writes: Sequence[Write],
        after: Callable[[], None] | None,
        tree: str | None,
        switch: bool,
    ) -> None:
        # Only now, when the commit before is durable. Rows alternate: this hand-off overwrites the
        # one from which the step goes on as long as that commit can still be lost.
        handoff = self._start(handoff_writes)
        arrays: dict[str, list[int]] = {}
        try:
            with span("wait for the state"):
                for state in states:
                    arrays.setdefault(state.array.name, []).extend(_results(state.futures))
        finally:
            with span("wait for the hand-off"):
                wait([future for started in handoff for future in started.futures])
        checksums = Checksums(arrays, [_results(started.futures) for started in handoff])
        # The record after all that it names is flushed, the switch after the record. A power loss
        # may keep the rename and drop what was not flushed: then the segment has no whole version.
        with span("write the record"):
            slot.write_record(record(checksums))
        if switch:
            with span("switch"):
                self._slots.switch(segment, slot, tree=tree)
        if after is not None:
            after()


def _results(futures: list[Future[int]]) -> list[int]:
    wait(futures)
    return [future.result() for future in futures]
