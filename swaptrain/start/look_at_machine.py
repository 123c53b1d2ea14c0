"""What the machine has: RAM within its limits, room on the disk of the run, a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from swaptrain.memory.limits import available_bytes, cgroup_limit
from swaptrain.store.disk.durable_files import existing_parent, free_bytes
from swaptrain.units import GIB, format_size, how_many

__all__ = ["MachineFacts", "look_at_machine"]


@dataclass(frozen=True)
class MachineFacts:
    """Bytes that are there at this moment."""

    ram_bytes: int
    """Free, within the limits of the process."""
    disk_bytes: int | None
    """Free where the run would lie; None where the file system does not say."""
    disk: Path
    cores: int
    device_bytes: int | None
    """Free on the CUDA device; None without one."""

    def line(self) -> str:
        """Say it in one sentence."""
        disk = "unknown room" if self.disk_bytes is None else format_size(self.disk_bytes)
        gpu = "no GPU"
        if self.device_bytes is not None:
            gpu = f"a GPU with {format_size(self.device_bytes)} free"
        return (
            f"{format_size(self.ram_bytes)} of RAM free, {disk} free on the disk of {self.disk}, "
            f"{how_many(self.cores, 'core')}, {gpu}"
        )


def look_at_machine(run_dir: Path) -> MachineFacts:
    """Return what a run in `run_dir` would find."""
    limit, available = cgroup_limit(), available_bytes()
    bounds = [] if available is None else [available]
    if limit is not None:
        bounds.append(limit.limit_bytes)
    device_bytes = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    where = existing_parent(run_dir)
    return MachineFacts(
        min(bounds, default=8 * GIB),
        free_bytes(run_dir),
        where,
        len(os.sched_getaffinity(0)),
        device_bytes,
    )
