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
from swaptrain.store.array import ArrayFiles
from swaptrain.store.direct import DirectIO
from swaptrain.store.record import write_record
from swaptrain.store.slot import Slot
from swaptrain.store.slots import Slots

__all__ = ["Checksums", "Committer", "Write"]


@dataclass(frozen=True)
class Write:
    """One array, or one row of it, and the bytes that are to be written there."""

    array: ArrayFiles
    buffer: memoryview
    row: int | None = None


@dataclass(frozen=True)
class Checksums:
    """The xxh3-64 of every chunk that a commit wrote."""

    arrays: dict[str, list[int]] = field(default_factory=dict)
    """Of the state, by the array's name."""
    handoff: list[list[int]] = field(default_factory=list)
    """Of the hand-off, in the order in which its writes were given."""


class Committer:
    """Makes commits durable one after the other, in the order of submission.

    A commit's writes into its spare slot begin at once. Its hand-off, whose buffer is the one
    before the last, its record and its switch wait until the commit before is durable. After an
    error nothing more is written by later commits or switched: their futures raise the same error.
    """

    def __init__(self, io: DirectIO, slots: Slots) -> None:
        self._io, self._slots = io, slots
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="swaptrain-commit")
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._pending: set[Future[None]] = set()

    def take(self, shape_class: str) -> Slot:
        """Reserve a spare slot, waiting for a commit in flight to free one.

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
                raise RunError(f"no spare slot of shape class {shape_class} is free")
            self._slots.wait(timeout_s=0.05)

    def check(self) -> None:
        """Raise the error of a commit that failed, if one did."""
        if self._error is not None:
            raise self._error

    def commit(
        self,
        segment: int,
        slot: Slot,
        record: Callable[[Checksums], dict[str, Any]],
        state_writes: Sequence[Write],
        handoff_writes: Sequence[Write] = (),
        after: Callable[[], None] | None = None,
        *,
        tree: str | None = None,
        switch: bool = True,
    ) -> Future[None]:
        """Commit `segment` into `slot`, a spare one that `take` gave.

        `record` makes the attributes of the slot's record from the checksums and, like `after`,
        which is called when the switch is durable, runs on the committer's thread. The buffers must
        not change until the future is done: then the commit cannot be lost, or the future raises
        the error (RunError). Without `switch`, the slot is the segment's own one in a tree that is
        not live (commit_every > 1), and only what belongs to it is made durable.
        """

        def writes() -> list[tuple[Write, list[Future[int]]]]:
            return self._start(state_writes) if self._error is None else []

        return self._submit(
            writes,
            lambda started: self._finish(
                segment, slot, record, started, handoff_writes, after, tree, switch
            ),
        )

    def write(
        self,
        record_path: Path,
        record_bytes: int,
        record: Callable[[Checksums], dict[str, Any]],
        writes: Sequence[Write],
        after: Callable[[], None] | None = None,
    ) -> Future[None]:
        """Write arrays in place, flush them, then a record of them: spilled gradients.

        In the same order as the commits. `record` gets the checksums as `handoff`.
        """

        def finish(_: list[tuple[Write, list[Future[int]]]]) -> None:
            checksums = [_results(futures) for _, futures in self._start(writes)]
            write_record(record_path, record(Checksums(handoff=checksums)), record_bytes)
            if after is not None:
                after()

        return self._submit(list, finish)

    def then(self, action: Callable[[], None]) -> Future[None]:
        """Run `action` on the committer's thread once all that was submitted before is durable."""
        return self._submit(list, lambda _: action())

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

    def _start(self, writes: Sequence[Write]) -> list[tuple[Write, list[Future[int]]]]:
        return [(w, w.array.write(self._io, w.buffer, row=w.row, flush=True)) for w in writes]

    def _submit(
        self,
        start: Callable[[], list[tuple[Write, list[Future[int]]]]],
        finish: Callable[[list[tuple[Write, list[Future[int]]]]], None],
    ) -> Future[None]:
        started = start()

        def run() -> None:
            # Whatever happens, no buffer is still being written when the future is done.
            wait([future for _, futures in started for future in futures])
            self.check()
            try:
                finish(started)
            except BaseException as error:
                self._error = error
                raise

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
        started: list[tuple[Write, list[Future[int]]]],
        handoff_writes: Sequence[Write],
        after: Callable[[], None] | None,
        tree: str | None,
        switch: bool,
    ) -> None:
        handoff = self._start(handoff_writes)
        wait([future for _, futures in handoff for future in futures])
        checksums = Checksums(
            {write.array.name: _results(futures) for write, futures in started},
            [_results(futures) for _, futures in handoff],
        )
        slot.write_record(record(checksums))
        if switch:
            self._slots.switch(segment, slot, tree=tree)
        if after is not None:
            after()


def _results(futures: list[Future[int]]) -> list[int]:
    wait(futures)
    return [future.result() for future in futures]
