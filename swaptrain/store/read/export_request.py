"""How an export asks a process that trains to hold still between two steps.

`RUN/export.request` is made by the exporter, which holds an flock on it for as long as it reads and
writes its pid and host into it. The trainer looks for the name at the end of each step. It makes
the store whole, appends `ready STEP`, and waits until it gets the flock itself: the exporter has
let go, or has died. Then it removes the file and goes on.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from swaptrain.errors import ConfigError, RunError
from swaptrain.store.access.lock import (
    LockOwner,
    is_held_by_this_thread,
    is_named,
    lock_owner,
    open_lock_file,
    owner_text,
    read_owner,
    try_lock,
)
from swaptrain.store.disk.durable_files import run_error
from swaptrain.store.paths import RunPaths

__all__ = ["ExportDoor", "ExportRequest"]

_POLL_S = 0.05
_READY = re.compile(rb"^ready ", re.MULTILINE)


class ExportRequest:
    """The exporter's side: holds the request while the weights are read.

    Waits for another exporter to be done. On a run directory that cannot be written nothing is
    asked for: then nobody trains in it either. Raises RunError on the thread that trains.
    """

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        if is_held_by_this_thread(run_dir):
            raise RunError(
                f"{run_dir} is training on this very thread, and its step is not at its end: take "
                "a snapshot with step=N (store.keep), or wait until the training has returned"
            )
        self._run_dir, self._note = run_dir, note
        self._path = RunPaths(run_dir.absolute()).export_request
        self._descriptor = -1
        self._said = False
        if os.access(run_dir, os.W_OK):
            self._ask()
        elif lock_owner(run_dir) is not None:
            raise ConfigError(
                f"{run_dir} is training and cannot be written by this user: an export of a running "
                f"run asks for the next step's end in {self._path}"
            )

    def wait(self) -> LockOwner | None:
        """Wait until no process writes to the store; return the one that holds still, if any."""
        while True:
            owner = lock_owner(self._run_dir)
            if owner is None or _is_answered(self._descriptor):
                return owner
            if not self._said:
                self._said = True
                self._note(f"{self._run_dir} is training ({owner}): waiting for the step's end")
            time.sleep(_POLL_S)

    def renew(self) -> None:
        """Let the trainer go on, and ask for the end of the next step."""
        self.close()
        self._ask()

    def close(self) -> None:
        """Let the trainer go on; doing it twice does no harm."""
        if self._descriptor >= 0:
            if is_named(self._descriptor, self._path):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> ExportRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self) -> None:
        said = False
        while True:
            descriptor = open_lock_file(self._path)
            try:
                if try_lock(descriptor) and is_named(descriptor, self._path):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, owner_text().encode(), 0)
                    break
                owner = read_owner(descriptor)
            except OSError as error:
                os.close(descriptor)
                raise run_error(error, self._path, "lock") from error
            os.close(descriptor)
            if not said and owner.pid is not None:
                said = True
                self._note(f"another export of {self._run_dir} is under way ({owner}): waiting")
            time.sleep(_POLL_S)
        self._descriptor = descriptor


class ExportDoor:
    """The trainer's side: sees a request with one look at the directory, and waits for it."""

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._run_dir, self._note = run_dir, note
        self._path = RunPaths(run_dir.absolute()).export_request

    def is_wanted(self) -> bool:
        """Whether an exporter asks for the end of this step, or did before it died."""
        return os.path.lexists(self._path)

    def let_in(self, step: int | None, tick: Callable[[], None]) -> None:
        """Say that the store is whole after `step`, and wait until the exporter is done.

        `tick` is called many times a second and may raise to stop. Without a step nothing is known
        of the store yet; it stays as it is all the same.
        """
        if not self.is_wanted():
            return
        descriptor = open_lock_file(self._path)
        try:
            if not try_lock(descriptor):
                where = "" if step is None else f" of step {step}"
                self._note(f"waiting while the weights{where} are read ({read_owner(descriptor)})")
                while not try_lock(descriptor):
                    # Again and again: the exporter may just be writing its name over it.
                    if not _is_answered(descriptor):
                        line = f"ready {'-' if step is None else step}\n".encode()
                        os.pwrite(descriptor, line, os.fstat(descriptor).st_size)
                    tick()
                    time.sleep(_POLL_S)
                self._note("they are read: going on")
            if is_named(descriptor, self._path):
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise run_error(error, self._path, "lock") from error
        finally:
            os.close(descriptor)


def _is_answered(descriptor: int) -> bool:
    return _READY.search(os.pread(descriptor, 4096, 0)) is not None
