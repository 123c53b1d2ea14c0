"""One writer per run: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from swaptrain.errors import RunError
from swaptrain.store.files import make_directory, run_error

__all__ = ["RunLock"]


class RunLock:
    """Holds `RUN/lock` by flock until it is closed; the file says who: pid, host, boot id.

    Raises RunError, naming the holder, when another process has it.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir.absolute() / "lock"
        self._made = [p for p in (path, *path.parents) if not p.exists()]
        make_directory(path.parent)
        try:
            # The descriptor is not inherited by programs that this process starts.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise run_error(error, path, "open") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise run_error(error, path, "lock") from error
            who = ", ".join(holder.splitlines()[:2]) or "unknown"
            raise RunError(
                f"{run_dir} is in use by another process ({who}): wait until it ends, or stop it"
            ) from error
        text = f"pid {os.getpid()}\nhost {socket.gethostname()}\nboot {_boot_id()}\n"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def close(self) -> None:
        """Release the lock; the file stays. Doing it twice does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def withdraw(self) -> None:
        """Remove the file and the directories that this lock made, as far as they are empty.

        For a command that is refused before it has written anything.
        """
        for path in self._made:
            if not path.is_dir():
                path.unlink(missing_ok=True)
            elif any(path.iterdir()):
                break
            else:
                path.rmdir()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
