"""Rows are encoded by several processes, in order; each runs templates within limits."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swaptrain.chat.encode import EncodeSettings, RowEncoder
from swaptrain.chat.files import read_rows
from swaptrain.chat.limits import MOST_BYTES, allow_cpu, begin_limits, row_limit
from swaptrain.chat.refusal import RowError, refused
from swaptrain.chat.tokens import Encoded
from swaptrain.processes import NEEDS_GUARD, process_pool
from swaptrain.units import GIB

__all__ = ["encode_files"]

_CHUNK_BYTES = 2**18
_CHUNK_ROWS = 512


@dataclass(frozen=True)
class _Chunk:
    """Rows of one file: their places, and their JSON."""

    path: str
    places: list[str]
    rows: list[bytes]


@dataclass(frozen=True)
class _EncodedChunk:
    """Rows after each other, how long each is, whether it is altered; the first refused one."""

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    altered: list[bool]
    refusal: tuple[int, str] | None


def encode_files(
    paths: Iterable[str], settings: EncodeSettings, *, key: str, processes: int
) -> Iterator[Encoded]:
    """Yield the tokens of the rows of all files in order, whatever the number of processes.

    Raises ConfigError with the place of the first row that cannot be taken.
    """
    pool = process_pool(processes, _begin, settings)
    running: deque[tuple[_Chunk, Future[_EncodedChunk]]] = deque()
    try:
        for chunk in _chunks(paths, settings, key):
            running.append((chunk, pool.submit(_encode, chunk.rows)))
            if len(running) > 2 * processes:
                yield from _rows(*running.popleft(), settings, key)
        while running:
            yield from _rows(*running.popleft(), settings, key)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks(paths: Iterable[str], settings: EncodeSettings, key: str) -> Iterator[_Chunk]:
    for path in paths:
        places: list[str] = []
        rows: list[bytes] = []
        size_bytes = 0
        for place, row in read_rows(path, key):
            if not settings.takes(row):
                continue
            places.append(place)
            rows.append(row)
            size_bytes += len(row)
            if size_bytes >= _CHUNK_BYTES or len(rows) >= _CHUNK_ROWS:
                yield _Chunk(path, places, rows)
                places, rows, size_bytes = [], [], 0
        if rows:
            yield _Chunk(path, places, rows)


def _rows(
    chunk: _Chunk, future: Future[_EncodedChunk], settings: EncodeSettings, key: str
) -> Iterator[Encoded]:
    try:
        found = future.result()
    except BrokenProcessPool as error:
        raise refused(
            key,
            chunk.path,
            f"{chunk.places[0]} to {chunk.places[-1]}",
            "the process that encodes these rows was ended: one of them, or the chat template, "
            f"takes more than {settings.most_chunk_s} s or {MOST_BYTES // GIB} GiB. {NEEDS_GUARD}",
        ) from error
    end = 0
    for length, altered in zip(found.lengths.tolist(), found.altered, strict=True):
        begin, end = end, end + length
        yield Encoded(found.ids[begin:end], found.trained[begin:end], altered)
    if found.refusal is not None:
        number, why = found.refusal
        raise refused(key, chunk.path, chunk.places[number], why)


_encoder: RowEncoder | None = None
_settings: EncodeSettings | None = None
"""Of this process, one of the pool's."""


def _begin(settings: EncodeSettings) -> None:
    """Make this process ready."""
    global _encoder, _settings
    _settings = settings
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is a thread's work
    _encoder = RowEncoder(settings)
    begin_limits()


def _encode(rows: list[bytes]) -> _EncodedChunk:
    assert _encoder is not None and _settings is not None
    allow_cpu(_settings.most_chunk_s)
    done: list[Encoded] = []
    refusal = None
    for number, row in enumerate(rows):
        try:
            with row_limit(_settings.most_row_s):
                done.append(_encoder.encode(row))
        except RowError as error:
            refusal = number, str(error)
            break
    return _EncodedChunk(
        np.concatenate([row.ids for row in done] or [np.zeros(0, dtype=np.uint32)]),
        np.concatenate([row.trained for row in done] or [np.zeros(0, dtype=np.bool_)]),
        np.array([len(row.ids) for row in done], dtype=np.int64),
        [row.altered for row in done],
        refusal,
    )
