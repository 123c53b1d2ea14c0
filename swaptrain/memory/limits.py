"""How much RAM this process may take: the limits of its control groups, of itself, what is free."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CgroupLimit", "address_space_bytes", "available_bytes", "cgroup_limit"]
__all__ += ["machine_bytes", "meminfo"]

_UNLIMITED_BYTES = 1 << 60  # version 1 says so with the largest whole pages of a long


@dataclass(frozen=True)
class CgroupLimit:
    """The lowest hard limit on this process' control group and those that it is in."""

    limit_bytes: int
    path: Path
    """The file that says so."""


def cgroup_limit(process: Path = Path("/proc/self")) -> CgroupLimit | None:
    """Return the limit of RAM of the control groups (version 1 and 2); None without one.

    `process` is the process' directory of /proc. What cannot be read is no limit.
    """
    found = []
    for path in _limit_files(process):
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # the root of a hierarchy has no such file
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            found.append(CgroupLimit(int(text), path))
    return min(found, key=lambda limit: limit.limit_bytes, default=None)


def _limit_files(process: Path) -> Iterator[Path]:
    """Yield the files that may limit: of the process' groups, and of those above them."""
    groups = dict(_groups(process))
    for root, mount_point, kind in _mounts(process):
        if kind not in groups:
            continue
        name = "memory.max" if kind == "v2" else "memory.limit_in_bytes"
        group = Path(groups[kind])
        # In a container the mount shows a part of the hierarchy: what lies above `root` is hidden.
        inner = group.relative_to(root) if group.is_relative_to(root) else group.relative_to("/")
        directory = mount_point / inner
        while directory.is_relative_to(mount_point):
            yield directory / name
            directory = directory.parent


def _groups(process: Path) -> Iterator[tuple[str, str]]:
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "v2", path
        elif "memory" in controllers.split(","):
            yield "v1", path


def _mounts(process: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield root, mount point and version of what is mounted of the memory controller."""
    for line in _lines(process / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        if kind == "cgroup2":
            yield fields[3], Path(fields[4]), "v2"
        elif kind == "cgroup" and "memory" in options.split(","):
            yield fields[3], Path(fields[4]), "v1"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def available_bytes() -> int | None:
    """Return the RAM that can be had without swapping (MemAvailable); None if nobody says."""
    return meminfo().get("MemAvailable")


def machine_bytes() -> int | None:
    """Return all RAM and swap that the machine has; None if nobody says."""
    said = meminfo()
    return said["MemTotal"] + said.get("SwapTotal", 0) if "MemTotal" in said else None


def meminfo(text: str | None = None) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; none where there is no such file."""
    lines = _lines(Path("/proc/meminfo")) if text is None else text.splitlines()
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0]) * 1024
    return found


def address_space_bytes() -> int | None:
    """Return what the limit on addresses (ulimit -v) still leaves; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return int(limit) - pages * resource.getpagesize()
