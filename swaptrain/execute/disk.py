"""How much disk a run takes, on which disks, and whether it is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from swaptrain.config import Config
from swaptrain.data.corpus import find_files
from swaptrain.errors import ConfigError
from swaptrain.execute.create import disk_bytes, slot_counts
from swaptrain.execute.home import StoreHome
from swaptrain.execute.planning import Plan
from swaptrain.store.files import existing_parent
from swaptrain.store.root import free_bytes
from swaptrain.units import format_size

__all__ = ["DiskNeed", "check_disk", "disk_needs", "estimated_data_bytes", "occupied_bytes"]


@dataclass(frozen=True)
class DiskNeed:
    """What a run reserves in one of its directories."""

    path: Path
    slots_bytes: int
    spill_bytes: int
    """Values, gradients, accumulators, frozen weights: what lies outside of the slots."""
    data_bytes: int
    """Tokens still to be written, as estimated."""

    @property
    def total_bytes(self) -> int:
        return self.slots_bytes + self.spill_bytes + self.data_bytes


def disk_needs(config: Config, plan: Plan, home: StoreHome, *, data_bytes: int) -> list[DiskNeed]:
    """Return what the run takes in `run.dir` (first) and in each of `store.paths`.

    Slots go to the paths in turn, in the order of their creation.
    """
    trees = config.store.commit_every > 1
    paths = list(config.store.paths or (config.run.dir,))
    slots = dict.fromkeys(paths, 0)
    number = 0
    for members, count in slot_counts(plan.layouts, trees=trees):
        for _ in range(count):
            slots[paths[number % len(paths)]] += plan.layouts.state[members[0]].nbytes
            number += 1
    rest_bytes = disk_bytes(plan, home, trees=trees) - sum(slots.values())
    run_dir = config.run.dir
    needs = [DiskNeed(run_dir, slots.pop(run_dir, 0), rest_bytes, data_bytes)]
    return needs + [DiskNeed(path, nbytes, 0, 0) for path, nbytes in slots.items()]


def check_disk(needs: list[DiskNeed], run_dir: Path) -> None:
    """Raise ConfigError where a disk has less free than the run needs of it.

    What a run that is started over, or whose creation goes on, holds in `run_dir` counts as free.
    """
    by_disk: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_disk.setdefault(existing_parent(need.path).stat().st_dev, []).append(need)
    holds = (run_dir / "slots").is_dir()
    held_device = run_dir.stat().st_dev if holds else None
    for device, group in by_disk.items():
        needed_bytes = sum(need.total_bytes for need in group)
        room_bytes = free_bytes(group[0].path)
        if device == held_device:
            room_bytes += occupied_bytes(run_dir)
        if needed_bytes > room_bytes:
            names = ", ".join(str(need.path) for need in group)
            key = "run.dir" if group[0].path == run_dir else "store.paths"
            raise ConfigError(
                f"{names}: the run needs {format_size(needed_bytes)} of disk there, "
                f"{format_size(room_bytes)} are free: make room, or set {key} to another disk"
            )


def estimated_data_bytes(config: Config) -> int:
    """Return what the tokens of a new run's text will take in `run.dir`, about.

    One token a byte for the byte tokenizer, one in three bytes for another.
    """
    if config.data.text is None or config.data.cache is not None:
        return 0
    if (config.run.dir / "data" / "train.json").exists():
        return 0
    text_bytes = sum(file.size_bytes for file in find_files(config.data.text, key="data.text"))
    return 2 * text_bytes if config.data.tokenizer == "bytes" else 4 * text_bytes // 3


def occupied_bytes(path: Path) -> int:
    """Return the bytes that the files below a directory take on its disk; links are not followed.

    Files that vanish meanwhile count as nothing.
    """
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
