"""Runs a command under limits of the kernel, of memory or of a disk's speed: cgroups of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SlowDisk", "can_limit", "run_limited"]

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class SlowDisk:
    """How many bytes a second the disk of each directory reads, and how many it writes."""

    bytes_per_s: int
    directories: Sequence[Path]


def can_limit() -> bool:
    """Whether this process may make a cgroup with a memory limit."""
    try:
        with _groups(1 << 30, None):
            return True
    except OSError:
        return False


def run_limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    memory_bytes: int | None = None,
    disk: SlowDisk | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command, page cache and children included within `memory_bytes`; None is no limit.

    A process that needs more is killed: its return code is then -9. Raises OSError where a cgroup
    cannot be made or the disk cannot be throttled.
    """
    with _groups(memory_bytes, disk) as groups:
        joins = "".join(f"echo $$ > {group}/cgroup.procs && " for group in groups)
        return subprocess.run(
            ["sh", "-c", f'{joins}exec "$0" "$@"', *command],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
        )


@contextmanager
def _groups(memory_bytes: int | None, disk: SlowDisk | None) -> Iterator[list[Path]]:
    """Make the groups that a process has to join for these limits, below this process's own.

    Cgroups of version 1 have a tree for each controller, those of version 2 one for all.
    """
    groups: dict[Path, Path] = {}
    with ExitStack() as stack:

        def group_of(controller: str) -> tuple[Path, bool]:
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            own = {name: path for line in lines for name, path in [line.split(":", 2)[1:]]}
            first = (_ROOT / controller).is_dir()
            path = own[controller].lstrip("/") if first else own[""][1:]
            parent = _ROOT / controller / path if first else _ROOT / path
            if parent not in groups:
                groups[parent] = parent / f"swaptrain-{os.getpid()}"
                groups[parent].mkdir()
                stack.callback(groups[parent].rmdir)
            return groups[parent], first

        if memory_bytes is not None:
            group, first = group_of("memory")
            file = "memory.limit_in_bytes" if first else "memory.max"
            (group / file).write_text(str(memory_bytes))
        if disk is not None:
            group, first = group_of("blkio")
            for number in {path.stat().st_dev for path in disk.directories}:
                device = f"{os.major(number)}:{os.minor(number)}"
                _slow_down(group, device, disk.bytes_per_s, first)
        yield list(groups.values())


def _slow_down(group: Path, device: str, bytes_per_s: int, first: bool) -> None:
    if not first:
        (group / "io.max").write_text(f"{device} rbps={bytes_per_s} wbps={bytes_per_s}")
        return
    for way in ("read", "write"):
        (group / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {bytes_per_s}")
