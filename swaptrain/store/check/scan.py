"""Compares chunk files with their checksums at the speed of the disk, in bounded memory."""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import xxhash

from swaptrain.errors import SwaptrainError, Where
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.io_buffers import io_buffer

__all__ = ["Chunk", "Scanner"]

PIECE_BYTES = 4 * 2**20
PAGE_BYTES = 4096

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class Chunk:
    """A chunk file, and what it has to hold."""

    where: Where
    path: Path
    checksum: int
    """The xxh3-64 of the whole file."""
    size_bytes: int | None
    """None where the metadata that says it is damaged: the checksum is of the file as it is."""


class Scanner:
    """A few threads, each of which reads a chunk in pieces and hashes them.

    While one hashes, which takes a fraction of the reading, the others keep the disk busy. Memory:
    `workers` times a piece of 4 MiB, whatever the size of chunks and store.
    """

    def __init__(self, io: DirectIO, workers: int = 8) -> None:
        self._io = io
        self._workers = workers
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="swaptrain-scan")
        self._local = threading.local()

    def scan(self, chunks: Iterable[tuple[Tag, Chunk]]) -> Iterator[tuple[Tag, Chunk, str | None]]:
        """Yield each chunk with what is wrong with it, or None, in order."""
        pending: deque[tuple[Tag, Chunk, Future[str | None]]] = deque()
        for tag, chunk in chunks:
            if len(pending) >= 4 * self._workers:
                first, of, future = pending.popleft()
                yield first, of, future.result()
            pending.append((tag, chunk, self._executor.submit(self.problem, chunk)))
        while pending:
            first, of, future = pending.popleft()
            yield first, of, future.result()

    def problem(self, chunk: Chunk) -> str | None:
        """Return what is wrong with a chunk, in words; None if its checksum is right."""
        try:
            status = os.stat(chunk.path)
        except FileNotFoundError:
            return "the file is missing"
        except OSError as error:
            return f"the file cannot be read: {error.strerror}"
        if not stat.S_ISREG(status.st_mode):
            return "is no file"
        size = status.st_size
        if chunk.size_bytes is not None and size != chunk.size_bytes:
            return f"the file has {size:,} bytes instead of {chunk.size_bytes:,}"
        if size == 0 or size % PAGE_BYTES:
            return f"the file has {size:,} bytes, no multiple of {PAGE_BYTES}"
        try:
            found = self._digest(chunk.path, size)
        except SwaptrainError as error:
            return f"the file cannot be read: {error}"
        if found != chunk.checksum:
            return f"a checksum is wrong: {chunk.checksum:016x} expected, {found:016x} found"
        return None

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Scanner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _digest(self, path: Path, size: int) -> int:
        digest, buffer = xxhash.xxh3_64(), self._buffer()
        for offset in range(0, size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size - offset)]
            self._io.read_now(path, piece, offset=offset)
            digest.update(piece)
        return digest.intdigest()

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = io_buffer(PIECE_BYTES)
        buffer: memoryview = self._local.buffer
        return buffer
