"""How much disk a run takes, on which disks, and whether it is there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.config.store import KeepConfig
from swaptrain.data.corpus import find_files
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.errors import ConfigError
from swaptrain.planning.planner import Plan
from swaptrain.store.access.lock import boot_id
from swaptrain.store.disk.durable_files import existing_parent
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.root import free_bytes
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.keeping import Keeping
from swaptrain.store.slots.slot_disks import SlotSpread
from swaptrain.store.slots.snapshot_links import snapshot_paths
from swaptrain.units import format_size

__all__ = ["DiskNeed", "DiskUse", "check_disk", "disk_needs", "disk_uses", "estimated_data_bytes"]
__all__ += [
    "keeping",
    "occupied_bytes",
    "other_bytes",
    "scratch_bytes",
    "slot_counts",
    "snapshot_count",
]


@dataclass(frozen=True)
class DiskNeed:
    """What a run reserves in one of its directories."""

    path: Path
    slots_bytes: int
    snapshots_bytes: int
    """Of the slots: those that are there for snapshots."""
    spill_bytes: int
    """Values, gradients, accumulators, frozen weights: what lies outside of the slots."""
    data_bytes: int
    """Tokens still to be written, as estimated."""

    @property
    def total_bytes(self) -> int:
        return self.slots_bytes + self.spill_bytes + self.data_bytes


@dataclass(frozen=True)
class DiskUse:
    """What one process of a run takes of one disk; of several ranks each tells all others."""

    rank: int
    kernel: str
    """Which machine it runs on, as `boot_id` says."""
    device: int
    """The disk, by the number that its machine gives it."""
    paths: list[str]
    has_run_dir: bool
    is_own_disk: bool
    """Whether it is the one of `distributed.dirs` that a rank's directory lies on."""
    needed_bytes: int
    snapshots_bytes: int
    reserved_bytes: int
    """Of the run, there already."""
    is_resumed: bool
    """Whether the run has anything on any disk."""
    is_there: bool
    """Whether all that the process needs is there already, on whatever disks."""
    free_bytes: int | None

    @property
    def lacking_bytes(self) -> int:
        """What it takes of the free bytes."""
        return 0 if self.is_there else max(0, self.needed_bytes - self.reserved_bytes)


def keeping(keep: KeepConfig) -> Keeping:
    """Return which steps `store.keep` keeps."""
    return Keeping(keep.every, keep.last, keep.best)


def snapshot_count(config: Config) -> int:
    """Return how many snapshots a run may have at a time; without `store.keep` those it has."""
    keep = config.store.keep
    return keeping(keep).count if keep is not None else len(snapshot_paths(config.run.dir))


def disk_needs(
    config: Config, plan: Plan, backing: DiskBacking, *, data_bytes: int
) -> list[DiskNeed]:
    """Return what the run takes in `run.dir` (first) and in each of `store.paths`.

    Slots go to the paths as `SlotSpread` says, in the order of their creation.
    """
    trees, snapshots = config.store.commit.is_whole, snapshot_count(config)
    run_dir = config.run.dir
    paths = list(config.store.paths or (run_dir,))
    slots, kept = dict.fromkeys([run_dir, *paths], 0), dict.fromkeys([run_dir, *paths], 0)
    spread = SlotSpread(paths)
    for members, count in slot_counts(plan.layouts, trees=trees, snapshots=snapshots):
        nbytes = plan.layouts.state[members[0]].nbytes
        for index in range(count):
            path = spread.next_disk(index, nbytes)
            slots[path] += nbytes
            kept[path] += nbytes if index < snapshots * len(members) else 0
    other = {run_dir: (other_bytes(plan, backing), data_bytes)}
    return [DiskNeed(path, slots[path], kept[path], *other.get(path, (0, 0))) for path in slots]


def disk_uses(needs: list[DiskNeed], run_dir: Path, *, rank: int = 0) -> list[DiskUse]:
    """Return what one process takes of each disk; `needs` are those of its run directory."""
    by_disk: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_disk.setdefault(existing_parent(need.path).stat().st_dev, []).append(need)
    reserved = _reserved_bytes(run_dir)
    # What is there may lie on other disks than a new run would put it on.
    is_there = sum(need.total_bytes for need in needs) <= sum(reserved.values())
    return [
        DiskUse(
            rank=rank,
            kernel=boot_id(),
            device=device,
            paths=[str(need.path) for need in group],
            has_run_dir=group[0].path == run_dir,
            is_own_disk=group[0].path == run_dir and run_dir.is_symlink(),
            needed_bytes=sum(need.total_bytes for need in group),
            snapshots_bytes=sum(need.snapshots_bytes for need in group),
            reserved_bytes=reserved.get(device, 0),
            is_resumed=bool(reserved),
            is_there=is_there,
            free_bytes=free_bytes(group[0].path),
        )
        for device, group in by_disk.items()
    ]


def check_disk(uses: Sequence[DiskUse], note: Callable[[str], None]) -> None:
    """Raise ConfigError where a disk has less free than all that use it need of it.

    What the run holds there already counts as free: it is used, or deleted when it is started over.
    Where a file system does not say what is free, `note` hears of it.
    """
    for group in _by_disk(uses).values():
        ranks = sorted({use.rank for use in group})
        names = ", ".join(path for use in group for path in use.paths)
        needed_bytes = sum(use.needed_bytes for use in group)
        needs = f"the run needs {format_size(needed_bytes)} of disk there"
        if len(ranks) > 1:
            needs += f" for ranks {', '.join(map(str, ranks))}"
        free = _free_bytes(group)
        if free is None:
            if not all(use.is_there for use in group):
                note(f"{names}: {needs}, and the file system does not say how much is free")
            continue
        if sum(use.lacking_bytes for use in group) > free:
            key = "run.dir" if group[0].has_run_dir else "store.paths"
            if any(use.is_own_disk for use in group):
                key = "distributed.dirs"
            snapshots_bytes = sum(use.snapshots_bytes for use in group)
            is_resumed = any(use.is_resumed for use in group)
            text, ways = f"{names}: {needs}, ", "make room"
            if snapshots_bytes:
                text += f"{format_size(snapshots_bytes)} of it for snapshots, "
                ways += ", lower store.keep.last or store.keep.best"
            if is_resumed:
                reserved_bytes = sum(use.reserved_bytes for use in group)
                text += f"{format_size(reserved_bytes)} of it are the run's already, "
            text += f"{format_size(free)} are free: {ways}"
            raise ConfigError(text if is_resumed else f"{text}, or set {key} to another disk")


def scratch_bytes(uses: Sequence[DiskUse], *, rank: int = 0) -> int:
    """Return what scratch of a rank may take: its part of half of what the run leaves free.

    That is on the disk of its directory. None of it where the file system does not say what is
    free.
    """
    for group in _by_disk(uses).values():
        if any(use.rank == rank and use.has_run_dir for use in group):
            free = _free_bytes(group)
            if free is None:
                return 0
            room_bytes = free - sum(use.needed_bytes - use.reserved_bytes for use in group)
            return max(0, room_bytes // 2) // len({use.rank for use in group})
    return 0


def _by_disk(uses: Sequence[DiskUse]) -> dict[tuple[str, int], list[DiskUse]]:
    found: dict[tuple[str, int], list[DiskUse]] = {}
    for use in uses:
        found.setdefault((use.kernel, use.device), []).append(use)
    return found


def _free_bytes(group: Sequence[DiskUse]) -> int | None:
    """Return what the processes that use a disk have seen free there, at the least."""
    said = [use.free_bytes for use in group if use.free_bytes is not None]
    return min(said, default=None)


def _reserved_bytes(run_dir: Path) -> dict[int, int]:
    """Return the bytes that a run has reserved for its state, by device; data not included."""
    reserved: dict[int, int] = {}
    paths = RunPaths(run_dir)
    slots = [path.resolve() for path in paths.slots.glob("*")]
    for folder in (*slots, paths.static, paths.spill):
        for path in folder.rglob("*"):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                reserved[status.st_dev] = reserved.get(status.st_dev, 0) + status.st_size
    return reserved


def estimated_data_bytes(config: Config) -> int:
    """Return what the tokens of a new run's text, or rows, will take in `run.dir`, about.

    One token a byte for the byte tokenizer, one in three bytes for another.
    """
    if config.data.cache is not None or RunPaths(config.run.dir).train_data.exists():
        return 0
    if config.data.chat is not None:
        files = find_files(config.data.chat, key="data.chat", directories=True)
        return 4 * sum(file.size_bytes for file in files) // 3
    if config.data.text is None:
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


def other_bytes(plan: Plan, backing: DiskBacking) -> int:
    """Return the bytes that a run reserves in its directory beside the slots and the data."""
    spilled = backing.files.disk_bytes()
    spilled += backing.files.saved_bytes(plan.builder.saves)
    return sum(f.nbytes for f in plan.layouts.frozen.values()) + spilled


def slot_counts(layouts: Layouts, *, trees: bool, snapshots: int) -> list[tuple[list[int], int]]:
    """Return the segments of each shape class, and how many slots the class has.

    A class of three and more segments has two free ones, so that the next commit's writes can begin
    while the last one is made durable; a smaller one has one; with two trees each segment has two
    slots. Each snapshot that may exist takes a slot per segment more. That is enough: a new one
    shares all of its slots with the live state until the oldest is dropped.
    """
    by_class: dict[str, list[int]] = {}
    for k, layout in layouts.state.items():
        by_class.setdefault(layout.shape_class, []).append(k)
    counts = []
    for members in by_class.values():
        free = len(members) if trees else (2 if len(members) >= 3 else 1)
        counts.append((members, (1 + snapshots) * len(members) + free))
    return counts
