"""Reads and writes of whole chunk files by a few threads, past the page cache."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from swaptrain.errors import DamagedStoreError, RunError, Where
from swaptrain.spans import span
from swaptrain.store.disk.durable_files import flush_file, run_error

__all__ = ["PAGE_BYTES", "DirectIO"]

PAGE_BYTES = 4096
PIECE_BYTES = 8 * 2**20
"""What a thread reads with one system call. What is read ahead would otherwise fill the disk's
queue, and a small write that is waited for stand behind all of it; larger writes are waited for
themselves."""
_BUFFERED_BYTES = 4 * 2**20
"""What a thread has in the page cache at most, where I/O is buffered."""

_SYNC_FILE_RANGE_WAIT_WRITE_WAIT = 7


class DirectIO:
    """Direct I/O of existing files; every request is a future.

    `threads` read, and half as many write: a disk moves more bytes where both are under way, and
    neither stands behind the other, nor a read behind a flush. Those of a kind begin in order.
    Buffers are 4096-aligned and, like offsets, multiples of 4096 bytes (ValueError otherwise); they
    must stay as they are until the future is done. A file is opened for each request (measured: 10
    microseconds), so that open descriptors are bounded by the threads. Where a file system refuses
    O_DIRECT, that file system is used through the page cache, whose pages are flushed and dropped
    as it goes; `on_fallback` is then called once with a message. Nothing is ever created or
    truncated, and after an error nothing is tried again.
    """

    def __init__(
        self, threads: int = 8, *, on_fallback: Callable[[str], None] | None = None
    ) -> None:
        self.threads, self._write_threads = threads, -(-threads // 2)
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="swaptrain-read")
        self._writers = ThreadPoolExecutor(
            self._write_threads, thread_name_prefix="swaptrain-write"
        )
        self._on_fallback = on_fallback
        self._lock = threading.Lock()
        self._buffered_devices: set[int] = set()
        self._read_bytes = self._write_bytes = 0

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return self._read_bytes

    @property
    def write_bytes(self) -> int:
        """Bytes written so far."""
        return self._write_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of page cache that the fallback may hold; 0 while all I/O is direct."""
        threads = self.threads + self._write_threads
        return threads * _BUFFERED_BYTES if self._buffered_devices else 0

    def read(
        self,
        path: Path,
        buffer: memoryview,
        *,
        offset: int = 0,
        checksum: int | None = None,
        where: Where | None = None,
    ) -> Future[None]:
        """Fill `buffer` from `offset` of a file; compare its xxh3-64 if `checksum` is given.

        The future raises DamagedStoreError, with the path and `where`, if the file is missing, too
        short or has another checksum; RunError if the disk fails.
        """
        _check_alignment(buffer, offset)
        return self._readers.submit(self._read, path, buffer, offset, checksum, where or Where())

    def read_now(self, path: Path, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill `buffer` like `read`, on the thread that calls; raises the same errors."""
        _check_alignment(buffer, offset)
        self._read(path, buffer, offset, None, Where())

    def write(
        self,
        path: Path,
        buffer: memoryview,
        *,
        offset: int = 0,
        flush: bool,
        checksum: bool = True,
    ) -> Future[int]:
        """Overwrite part of a file in place, and fdatasync it if `flush`.

        The future gives the xxh3-64 of the buffer (0 without `checksum`); raises RunError.
        """
        _check_alignment(buffer, offset)
        return self._writers.submit(self._write, path, buffer, offset, flush, checksum)

    def write_now(self, path: Path, buffer: memoryview) -> int:
        """Overwrite part of a file like `write`, unflushed, on the thread that calls.

        For what is waited for: it does not come after all that was asked for before.
        """
        _check_alignment(buffer, 0)
        return self._write(path, buffer, 0, flush=False, checksum=True)

    def flush(self, path: Path) -> Future[None]:
        """Make what was written to a file durable (fdatasync); the future raises RunError."""
        return self._writers.submit(flush_file, path)

    def close(self) -> None:
        """Finish what was asked for and end the threads."""
        self._readers.shutdown()
        self._writers.shutdown()

    def __enter__(self) -> DirectIO:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(
        self, path: Path, buffer: memoryview, offset: int, checksum: int | None, where: Where
    ) -> None:
        try:
            with span("read", path, len(buffer)):
                done = self._transfer(path, os.O_RDONLY, buffer, offset, os.preadv, flush=False)
        except FileNotFoundError as error:
            raise DamagedStoreError(
                "a file of the store is missing", path=path, **asdict(where)
            ) from error
        except OSError as error:
            raise run_error(error, path, "read") from error
        if done < len(buffer):
            raise DamagedStoreError(
                f"a file of the store is too short: {len(buffer)} bytes expected at {offset}, "
                f"{done} found",
                path=path,
                **asdict(where),
            )
        if checksum is not None:
            with span("checksum"):
                found = xxhash.xxh3_64_intdigest(buffer)
            if found != checksum:
                raise DamagedStoreError(
                    f"a checksum is wrong: {checksum:016x} expected, {found:016x} found",
                    path=path,
                    **asdict(where),
                )
        with self._lock:
            self._read_bytes += done

    def _write(
        self, path: Path, buffer: memoryview, offset: int, flush: bool, checksum: bool
    ) -> int:
        digest = 0
        if checksum:
            with span("checksum"):
                digest = xxhash.xxh3_64_intdigest(buffer)
        try:
            with span("write", path, len(buffer)):
                done = self._transfer(path, os.O_WRONLY, buffer, offset, os.pwritev, flush=flush)
        except OSError as error:
            raise run_error(error, path, "write", len(buffer)) from error
        if done < len(buffer):
            raise RunError(f"cannot write {path}: the system wrote {done} of {len(buffer)} bytes")
        with self._lock:
            self._write_bytes += done
        return digest

    def _transfer(
        self,
        path: Path,
        mode: int,
        buffer: memoryview,
        offset: int,
        system_call: Callable[[int, list[memoryview], int], int],
        *,
        flush: bool,
    ) -> int:
        """Move the buffer to or from a file; return the bytes moved, fewer at the end of it."""
        descriptor, direct = self._open(path, mode)
        try:
            piece_bytes = len(buffer) if mode == os.O_WRONLY else PIECE_BYTES
            if not direct:
                piece_bytes = _BUFFERED_BYTES
            done = 0
            while done < len(buffer):
                piece = buffer[done : done + piece_bytes]
                try:
                    moved = system_call(descriptor, [piece], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    direct, piece_bytes = False, _BUFFERED_BYTES
                    buffered = os.open(path, mode | os.O_CLOEXEC)
                    os.close(descriptor)
                    descriptor = buffered
                    self._fall_back(os.fstat(descriptor).st_dev, path)
                    continue
                if moved == 0:
                    break
                if direct and moved % PAGE_BYTES:
                    # Direct I/O goes on at a whole page; none is what lies before a file's end.
                    moved -= moved % PAGE_BYTES
                    if not moved:
                        break
                if not direct:
                    if mode == os.O_WRONLY:
                        _write_back(descriptor, offset + done, moved)
                    os.posix_fadvise(descriptor, offset + done, moved, os.POSIX_FADV_DONTNEED)
                done += moved
            if flush:
                with span("flush"):
                    os.fdatasync(descriptor)
            return done
        finally:
            os.close(descriptor)

    def _open(self, path: Path, mode: int) -> tuple[int, bool]:
        if not self._buffered_devices or path.stat().st_dev not in self._buffered_devices:
            try:
                return os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back(path.stat().st_dev, path)
        return os.open(path, mode | os.O_CLOEXEC), False

    def _fall_back(self, device: int, path: Path) -> None:
        with self._lock:
            first = device not in self._buffered_devices
            self._buffered_devices.add(device)
        if first and self._on_fallback is not None:
            self._on_fallback(
                f"the file system of {path} refuses O_DIRECT: reading and writing go through the "
                "page cache, slower, with its pages dropped as it goes"
            )


def _check_alignment(buffer: memoryview, offset: int) -> None:
    address = np.frombuffer(buffer, np.uint8).ctypes.data if len(buffer) else 0
    if buffer.format != "B" or address % PAGE_BYTES or len(buffer) % PAGE_BYTES:
        raise ValueError("direct I/O needs bytes that start at and fill multiples of 4096")
    if offset % PAGE_BYTES:
        raise ValueError(f"direct I/O needs an offset that is a multiple of 4096, not {offset}")


def _write_back(descriptor: int, offset: int, nbytes: int) -> None:
    """Wait until the dirty pages of a range are written, so that they can be dropped."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "sync_file_range"):
        os.fdatasync(descriptor)
        return
    arguments = (ctypes.c_int(descriptor), ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    if libc.sync_file_range(*arguments, ctypes.c_uint(_SYNC_FILE_RANGE_WAIT_WRITE_WAIT)):
        code = ctypes.get_errno()
        if code not in {errno.ENOSYS, errno.ESPIPE}:
            raise OSError(code, os.strerror(code))
        os.fdatasync(descriptor)
