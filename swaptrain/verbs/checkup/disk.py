"""The disk of a run: its file system, room, direct I/O, what a sync takes, its speed."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from swaptrain.errors import SwaptrainError
from swaptrain.machine.speeds import known_machine, machine
from swaptrain.program.cost import Disk
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import existing_parent, free_bytes
from swaptrain.store.disk.flush import syncfs_reaches_disk
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.units import GIB, MIB, format_duration, format_size
from swaptrain.verbs.checkup.result import CheckResult, Verdict, checked, noted, wrong

__all__ = ["Mount", "check_disk", "file_system", "mount_of", "room", "speed", "sync_time"]

_RAM = ("tmpfs", "ramfs", "hugetlbfs")
_LAYERS = ("overlay", "aufs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs")
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs")
_SYNCS = 9
_SYNC_S = 1.0
"""No sync is begun after so long."""
_NO_SYNC_S = 20e-6
"""A write that a drive has acknowledged takes longer, also on the fastest ones."""
_LONG_SYNC_S = 0.05
_SLOW_BYTES_PER_S = 400e6
_LEAST_ROOM, _LITTLE_ROOM = 256 * MIB, 10 * GIB
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Mount:
    """Where a path lies, as /proc/self/mountinfo says it."""

    point: str
    kind: str
    source: str
    is_read_only: bool


def check_disk(path: Path, note: Callable[[str], None]) -> Iterator[CheckResult]:
    """Yield what is found of the disk where `path` lies, or would lie.

    Files are written there for the checks, and deleted.
    """
    there = existing_parent(path)
    mount = mount_of(there)
    kind = file_system(there, mount)
    yield kind
    yield room(path)
    if not there.is_dir():
        yield wrong("disk", "directory", f"{there} is a file", "name a directory")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="swaptrain-doctor-", dir=there) as folder:
            file = Path(folder) / "probe"
            yield _direct(file)
            yield sync_time(_syncs(file))
            if not syncfs_reaches_disk(there):
                yield noted(
                    "disk",
                    "syncfs",
                    "this file system is not known to pass one sync of everything on",
                    "nothing: swaptrain flushes file by file there, slower and as safe",
                )
            yield _clock(file)
    except (OSError, SwaptrainError) as error:
        said = str(error).partition("\n")[0]
        yield wrong(
            "disk", "writing", f"{there}: {said}", "give this user permission, or another directory"
        )
        return
    if kind.verdict is not Verdict.PROBLEM:
        yield _speed(there, note)


def mount_of(path: Path, table: str | None = None) -> Mount | None:
    """Return the mount that a path lies in; `table` is the text of mountinfo (a test's)."""
    if table is None:
        try:
            table = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return None
    resolved, found = path.resolve(), None
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields, ends = before.split(), after.split()
        if len(fields) < 6 or len(ends) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        # Of two mounts on one point the later one is seen.
        if resolved.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            options = {*fields[5].split(","), *ends[2].split(",")}
            found = Mount(point, ends[0], ends[1], "ro" in options)
    return found


def file_system(path: Path, mount: Mount | None) -> CheckResult:
    """Judge the kind of a file system."""
    if mount is None:
        said = "the kernel does not say which file system it is"
        return noted("disk", "file system", f"{path}: {said}", "nothing, if it is an SSD's")
    found = f"{path} lies on {mount.kind} ({_shown(mount.source)} at {_shown(mount.point)})"
    if mount.is_read_only:
        return wrong("disk", "file system", f"{found}, read-only", "mount it for writing")
    if mount.kind in _RAM:
        advice = "set run.dir to a directory on an SSD: a run on RAM is refused"
        return wrong("disk", "file system", f"{found}, which is RAM", advice)
    if mount.kind in _LAYERS:
        advice = "mount a volume into the container, and put run.dir there: a layer is slower"
        return noted("disk", "file system", f"{found}, a container's layer", advice)
    if mount.kind in _NETWORK:
        advice = "use a disk of this machine: the network bounds the step, and a server may lose "
        advice += "what it said it had written"
        return noted("disk", "file system", f"{found}, a network's", advice)
    if mount.kind.startswith("fuse"):
        advice = "look at the speed and the sync below: a program stands between run and disk"
        return noted("disk", "file system", found, advice)
    if mount.kind not in _LOCAL:
        return noted("disk", "file system", f"{found}, never tried", "look at the lines below")
    return checked("disk", "file system", found)


def room(path: Path) -> CheckResult:
    """Judge the free space."""
    free = free_bytes(path)
    if free is None:
        return noted("disk", "room", "the file system does not say what is free", "see to it")
    found = f"{format_size(free)} free, enough to train {free / 12 / 1e9:,.2f} B parameters"
    if free < _LEAST_ROOM:
        return wrong("disk", "room", found, "make room: a run takes 12 bytes a parameter")
    if free < _LITTLE_ROOM:
        return noted("disk", "room", found, "make room: a run takes 12 bytes a parameter")
    return checked("disk", "room", found)


def sync_time(seconds: float) -> CheckResult:
    """Judge the median time of a small write and its fsync."""
    shown = f"{seconds * 1e6:.0f} microseconds" if seconds < 1e-4 else format_duration(seconds)
    found = f"a write of 4 KiB and its fsync take {shown}"
    if seconds < _NO_SYNC_S:
        advice = "a power cut may lose committed steps here: put run.dir on a disk whose sync waits"
        return noted("disk", "sync", f"{found}: sooner than a drive answers", advice)
    if seconds > _LONG_SYNC_S:
        advice = "each segment's commit waits for several: store.commit.unit=step has fewer"
        return noted("disk", "sync", found, advice)
    return checked("disk", "sync", found)


def speed(disk: Disk | None, when: str) -> CheckResult:
    """Judge the speed of a disk, in bytes per second."""
    if disk is None:
        return noted("disk", "speed", "could not be measured", "make room for 256 MiB and see why")
    found = (
        f"{format_size(disk.read_bytes_per_s)}/s read, {format_size(disk.write_bytes_per_s)}/s "
        f"written, {format_size(disk.mixed_bytes_per_s)}/s both ({when})"
    )
    if disk.mixed_bytes_per_s < _SLOW_BYTES_PER_S:
        advice = "an NVMe drive has five times as much; with this one raise data.micro_batches"
        return noted("disk", "speed", found, advice)
    return checked("disk", "speed", found)


def _direct(file: Path) -> CheckResult:
    said: list[str] = []
    file.write_bytes(bytes(_PROBE_BYTES))
    buffer = io_buffer(_PROBE_BYTES)
    with DirectIO(1, on_fallback=said.append) as io:
        io.write(file, buffer, flush=True).result()
        io.read(file, buffer).result()
    if said:
        return noted(
            "disk",
            "direct I/O",
            "refused: reads and writes go through the page cache",
            "nothing, if it must be this file system: it is slower and takes more of the processor",
        )
    return checked("disk", "direct I/O", "works")


def _syncs(file: Path) -> float:
    """Return the median seconds of a small write in place and its fsync."""
    found: list[float] = []
    begun = time.perf_counter()
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        while len(found) < _SYNCS and time.perf_counter() - begun < _SYNC_S:
            content, one = os.urandom(4096), time.perf_counter()
            os.pwrite(descriptor, content, 0)
            os.fsync(descriptor)
            found.append(time.perf_counter() - one)
    finally:
        os.close(descriptor)
    return statistics.median(found)


def _clock(file: Path) -> CheckResult:
    """Compare the clock of the machine with that of the file system."""
    os.utime(file)
    apart = abs(time.time() - file.stat().st_mtime)
    if apart > 5:
        advice = "set both by NTP"
        return noted("clock", "of files", f"{apart:.0f} s from the machine's clock", advice)
    return checked("clock", "of files", "that of the machine")


def _speed(there: Path, note: Callable[[str], None]) -> CheckResult:
    device = torch.device("cpu")
    when = "measured before" if known_machine(there, device) is not None else "measured now"
    found = machine(there, device, (), note)
    return speed(None if found is None else found.disk, when)


def _shown(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
