"""A disk in memory that answers when a test says so, with the interface of `DirectIO`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["LateIO"]


class LateIO:
    """Writes reach `disk`, and reads their buffers, in any order; a read verifies its checksum."""

    def __init__(self) -> None:
        self.disk: dict[Path, bytes] = {}
        self.pending: list[tuple[Future[int], Callable[[], int]]] = []

    def read(
        self, path: Path, buffer: memoryview, *, checksum: int | None, where: object
    ) -> Future[int]:
        def run() -> int:
            content = self.disk[path]
            assert checksum in (None, xxhash.xxh3_64_intdigest(content)), (path, where)
            buffer[:] = content
            return 0

        return self._submit(run)

    def write(
        self, path: Path, buffer: memoryview, *, flush: bool = False, checksum: bool = True
    ) -> Future[int]:
        def run() -> int:
            self.disk[path] = bytes(buffer)
            return xxhash.xxh3_64_intdigest(buffer)

        return self._submit(run)

    def complete(self, index: int) -> None:
        """Let one request happen."""
        future, run = self.pending.pop(index)
        future.set_result(run())

    def wait(self, fs: Sequence[Future[Any]], **_: object) -> None:
        """Let the requests happen that are waited for, the last submitted first."""
        for future in reversed(fs):
            for index, (found, _run) in enumerate(self.pending):
                if found is future:
                    self.complete(index)
                    break

    def _submit(self, run: Callable[[], int]) -> Future[int]:
        future: Future[int] = Future()
        self.pending.append((future, run))
        return future
