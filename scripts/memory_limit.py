"""Runs a command under a hard memory limit of the kernel: a cgroup of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["can_limit", "run_limited"]

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def can_limit() -> bool:
    """Whether this process may make a cgroup with a memory limit."""
    try:
        with _group(1 << 30):
            return True
    except OSError:
        return False


def run_limited(
    command: Sequence[str], limit_bytes: int | None, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command, page cache and children included within `limit_bytes`; None is no limit.

    A process that needs more is killed: its return code is then -9. Raises OSError where a cgroup
    cannot be made.
    """
    if limit_bytes is None:
        return _run(command, environment)
    with _group(limit_bytes) as group:
        shell = f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"'
        return _run(["sh", "-c", shell, *command], environment)


def _run(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@contextmanager
def _group(limit_bytes: int) -> Iterator[Path]:
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().split())
    if _V1.is_dir():
        group, key = _V1 / own["memory"].lstrip("/"), "memory.limit_in_bytes"
    else:
        group, key = _V2 / own[""].lstrip("/"), "memory.max"
    group = group / f"swaptrain-{os.getpid()}"
    group.mkdir()
    try:
        (group / key).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()
