"""A directory that is there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swaptrain.errors import RunError
from swaptrain.store.access.lock import is_named, open_lock_file, try_lock
from swaptrain.store.disk.durable_files import flush_directory, make_directory

__all__ = ["new_directory"]


@contextmanager
def new_directory(to: Path) -> Iterator[Path]:
    """Yield a directory to write into, which then becomes `to`, durably; it may exist, empty.

    After an error nothing of it is left. Raises RunError, also where another process writes it.
    """
    aside = to.with_name(to.name + ".partial")
    with _alone(to):
        if aside.exists():
            shutil.rmtree(aside)  # of a process that was killed
        make_directory(aside)
        try:
            yield aside
            flush_directory(aside)
            if to.exists():
                to.rmdir()
            aside.rename(to)
        except OSError as error:
            raise RunError(f"cannot write {to}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        flush_directory(to.parent)


@contextmanager
def _alone(to: Path) -> Iterator[None]:
    """Let no other process write the same directory; raises RunError where one does."""
    lock = to.with_name(to.name + ".partial-lock")
    descriptor = open_lock_file(lock)
    try:
        if not (try_lock(descriptor) and is_named(descriptor, lock)):
            raise RunError(f"another process is writing {to}: wait until it is done")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
