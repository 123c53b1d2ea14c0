"""Runs a command under limits of the kernel, of memory or of a disk's speed: cgroups of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["can_limit", "run_limited", "run_throttled"]

_ROOT = Path("/sys/fs/cgroup")


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
        return _run_in(group, command, environment)


def run_throttled(
    command: Sequence[str],
    bytes_per_s: int,
    directories: Sequence[Path],
    environment: Mapping[str, str],
) -> subprocess.CompletedProcess[str]:
    """Run a command for which the disk of each directory reads so many bytes a second, and writes.

    Raises OSError where a cgroup cannot be made or the disk cannot be throttled.
    """
    with _slow_group(bytes_per_s, directories) as group:
        return _run_in(group, command, environment)


def _run_in(
    group: Path, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
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
    with _new_group("memory") as (group, first):
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit_bytes))
        yield group


@contextmanager
def _slow_group(bytes_per_s: int, directories: Sequence[Path]) -> Iterator[Path]:
    with _new_group("blkio") as (group, first):
        for number in {directory.stat().st_dev for directory in directories}:
            disk = f"{os.major(number)}:{os.minor(number)}"
            if first:
                for way in ("read", "write"):
                    limit = f"{disk} {bytes_per_s}"
                    (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
            else:
                (group / "io.max").write_text(f"{disk} rbps={bytes_per_s} wbps={bytes_per_s}")
        yield group


@contextmanager
def _new_group(controller: str) -> Iterator[tuple[Path, bool]]:
    """Make a group below this process's own; also say whether it is one of cgroups' version 1."""
    lines = Path("/proc/self/cgroup").read_text().split()
    own = {name: path for line in lines for name, path in [line.split(":", 2)[1:]]}
    first = (_ROOT / controller).is_dir()
    parent = _ROOT / controller / own[controller].lstrip("/") if first else _ROOT / own[""][1:]
    group = parent / f"swaptrain-{os.getpid()}"
    group.mkdir()
    try:
        yield group, first
    finally:
        group.rmdir()
