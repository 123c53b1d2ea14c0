"""Slots: committed copies of segments' state, and the live names that point to them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from swaptrain.errors import ConfigError, DamagedStoreError, RunError, Where
from swaptrain.store.array import ArrayFiles
from swaptrain.store.contained import POOL, is_pool_link
from swaptrain.store.files import (
    allocate_blank,
    disk_errors,
    flush_directory,
    flush_file_system,
    make_directory,
    replace_link,
    run_error,
)
from swaptrain.store.holds import held_slots, snapshot_paths
from swaptrain.store.layout import SegmentLayout
from swaptrain.store.record import read_record, write_record
from swaptrain.store.root import ensure_group, link_static, segments_directory
from swaptrain.store.schema import check_state, check_table

__all__ = ["TREES", "Slot", "Slots", "create_frozen", "delete_slots", "frozen_slot"]

TREES = ("a", "b")
"""The two trees of a store with commit_every > 1: one is live, the other one is being written."""

_RECORD = "zarr.json"


@dataclass(frozen=True)
class Slot:
    """A directory with preallocated arrays and a record: one copy of one segment's state."""

    path: Path

    @property
    def id(self) -> str:
        """The slot's name, which is that of its directory."""
        return self.path.name

    @property
    def record_path(self) -> Path:
        """The group's zarr.json, the only metadata that a commit changes."""
        return self.path / _RECORD

    @cached_property
    def arrays(self) -> dict[str, ArrayFiles]:
        """The arrays by name, as found on disk; raises DamagedStoreError."""
        return {
            file.parent.name: ArrayFiles.open(file.parent)
            for file in sorted(self.path.glob("*/zarr.json"))
        }

    def array(self, name: str) -> ArrayFiles:
        """Return one array; raises DamagedStoreError when it is not there."""
        if name not in self.arrays:
            raise DamagedStoreError("an array is missing", array=name, path=self.path)
        return self.arrays[name]

    def read_record(self) -> dict[str, Any]:
        """Return what the record says.

        Raises DamagedStoreError when it does not verify or does not fit the arrays of the slot.
        """
        record = read_record(self.record_path)
        check_state(record, self.record_path)
        self.check_arrays(record)
        check_table(record, self.arrays, self.record_path, record["segment"])
        return record

    def write_record(self, attributes: dict[str, Any]) -> None:
        """Overwrite the record in place and flush it; raises RunError.

        It also says what the metadata of the arrays is, which nothing but the record could verify.
        """
        attributes = {**attributes, "metadata": self.metadata}
        write_record(self.record_path, attributes, self.record_path.stat().st_size)

    @cached_property
    def metadata(self) -> dict[str, int]:
        """By array: the xxh3-64 of its zarr.json, which stays as it is once the slot exists."""
        return {
            name: xxhash.xxh3_64_intdigest((files.path / "zarr.json").read_bytes())
            for name, files in self.arrays.items()
        }

    def check_arrays(self, record: Mapping[str, Any]) -> None:
        """Compare the arrays that are there with the record; raises DamagedStoreError."""
        for damage in self.damaged_arrays(record):
            raise damage

    def check_files(self, record: Mapping[str, Any]) -> None:
        """Look at the sizes of the chunk files, not at their bytes; raises DamagedStoreError.

        What is missing or cut short is found before anything is computed, and also where a run
        writes to a file before it would have read it.
        """
        for name in record["checksums"]:
            for chunk, path in enumerate(self.array(name).files()):
                of = Where(record["segment"], name, chunk)
                expected = self.array(name).chunk_bytes
                try:
                    found = path.stat().st_size
                except FileNotFoundError:
                    error = DamagedStoreError("a file of the store is missing", path=path)
                    raise error.within(of) from None
                except OSError as error:
                    raise run_error(error, path, "look at") from error
                if found < expected:
                    text = f"a file of the store has {found:,} bytes instead of {expected:,}"
                    raise DamagedStoreError(text, path=path).within(of)

    def damaged_arrays(self, record: Mapping[str, Any]) -> Iterator[DamagedStoreError]:
        """Yield what is wrong with the metadata of the arrays that the record names."""
        for name, checksums in record["checksums"].items():
            of = Where(record["segment"], name)
            path = self.path / name / "zarr.json"
            expected = record.get("metadata", {}).get(name)
            try:
                files = ArrayFiles.open(path.parent)
                content = path.read_bytes()
                if expected is not None and xxhash.xxh3_64_intdigest(content) != expected:
                    raise DamagedStoreError("an array's metadata does not verify", path=path)
                if files.chunks != len(checksums):
                    raise DamagedStoreError("an array has another size than its record", path=path)
            except DamagedStoreError as error:
                yield error.within(of)

    def create(self, layout: SegmentLayout, record_bytes: int, *, flush: bool = True) -> None:
        """Make the directory, its arrays and a blank record, durably if `flush`; keep what exists.

        Nothing is created, renamed or resized in the directory afterwards.
        """
        with disk_errors(self.path, "create", layout.nbytes):
            self.path.mkdir(parents=True, exist_ok=True)
            for array in layout.arrays:
                ArrayFiles.of_layout(self.path / array.name, array).create(flush=False)
            allocate_blank(self.record_path, record_bytes)
        if flush:
            flush_file_system(self.path)


class Slots:
    """All slots of a run, which of them are live, and the switch from one to another.

    On disk a slot is `RUN/slots/ID`; with several `paths` that is a symlink into one of them, in
    turn. A live name is the symlink `RUN/store/segments/NNN`. Which slots are free is not stored
    anywhere: all but the live ones, those that a snapshot holds, and the taken ones. Thread-safe.

    With `trees`, `RUN/store` is a symlink to `RUN/trees/a` or `RUN/trees/b`, each a hierarchy of
    its own whose live names do not change after creation, and `switch_tree` is the commit.
    """

    def __init__(
        self, run_dir: Path, paths: Sequence[Path] | None = None, *, trees: bool = False
    ) -> None:
        self.run_dir = run_dir.absolute()
        self._paths = tuple(path.absolute() for path in paths or ())
        self._trees = trees
        self._slots: dict[str, list[Slot]] = {}
        self._taken: set[Slot] = set()
        self._held = {
            path.name: frozenset(held_slots(path).values()) for path in snapshot_paths(self.run_dir)
        }
        """Names of slots, by the snapshot that holds them."""
        self._changed = threading.Condition(threading.RLock())
        for tree in TREES if trees else (None,):
            ensure_group(segments_directory(self.run_dir, tree))
        make_directory(self.run_dir / "slots")

    def create(self, layout: SegmentLayout, count: int, *, record_bytes: int) -> list[Slot]:
        """Make sure that there are `count` slots of the layout's shape class; return them.

        `record_bytes` is the largest `record_size` of the segments of the class. Doing it again,
        after a crash or when a run is opened, adds what is missing and deletes free slots beyond
        `count`; a slot in use stays as it is. Raises RunError (disk full).
        """
        shape_class = layout.shape_class
        folder = self.run_dir / "slots"
        # Links to what was moved are mended before anything without a link is deleted.
        for link in sorted(path for path in folder.iterdir() if path.is_symlink()):
            self._check_link(link)
        present = {path.name for path in folder.glob(f"{shape_class}-*")}
        used_ids = self._used_ids()
        used, spare = present & used_ids, sorted(present - used_ids)
        free_count = max(0, count - len(used))
        numbers = (f"{shape_class}-{number:03d}" for number in itertools.count())
        new = (name for name in numbers if name not in present | used_ids)
        free = [*spare[:free_count], *itertools.islice(new, max(0, free_count - len(spare)))]
        delete_slots(self.run_dir, [folder / name for name in spare[free_count:]])
        self._delete_unlinked()
        # What the last commit or a snapshot left is not touched: what is missing is not made up.
        kept = self._live_ids((self.tree() or TREES[0]) if self._trees else None).union(
            *self._held.values()
        )
        slots = [Slot(folder / name) for name in sorted([*used, *free])]
        for slot in slots:
            self._place(slot.path)
            if slot.id not in kept:
                slot.create(layout, record_bytes, flush=False)
        for disk in (folder, *self._paths):
            flush_file_system(disk)
        with self._changed:
            self._slots[shape_class] = slots
        return slots

    def live(self, segment: int, *, tree: str | None = None) -> Slot:
        """Return the slot that a live name points to (in the current tree).

        Raises DamagedStoreError when there is no such name or slot.
        """
        link = self._link(segment, tree)
        try:
            slot = self._known(Path(os.readlink(link)).name)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EINVAL}:
                raise run_error(error, link, "read") from error
            raise DamagedStoreError(
                "a segment's live name is missing", segment=segment, path=link
            ) from error
        if not slot.path.is_dir():
            raise DamagedStoreError(
                "a segment's slot is missing: is its disk there?", segment=segment, path=slot.path
            )
        return slot

    def free(self, shape_class: str) -> list[Slot]:
        """Return the slots of a class that are neither live, in any tree, nor held, nor taken."""
        with self._changed:
            used = self._used_ids()
            return [slot for slot in self._slots.get(shape_class, []) if slot.id not in used]

    def take(self, shape_class: str) -> Slot | None:
        """Reserve a free slot for writing, if there is one; `switch` or `give` ends that."""
        with self._changed:
            free = self.free(shape_class)
            if not free:
                return None
            self._taken.add(free[0])
            return free[0]

    def give(self, slot: Slot) -> None:
        """Give a taken slot back that will not be switched to."""
        with self._changed:
            self._taken.discard(slot)
            self._changed.notify_all()

    def hold(self, snapshot: str, ids: Iterable[str]) -> None:
        """Keep slots for a snapshot, from the moment that it has its name until `release`."""
        with self._changed:
            self._held[snapshot] = frozenset(ids)

    def release(self, snapshot: str) -> None:
        """Free the slots of a snapshot that is gone durably, as far as nothing else has them."""
        with self._changed:
            self._held.pop(snapshot, None)
            self._changed.notify_all()

    def is_held(self, slot: Slot) -> bool:
        """Whether a snapshot holds the slot, so that nobody may write there."""
        with self._changed:
            return any(slot.id in ids for ids in self._held.values())

    def wait(self, timeout_s: float) -> None:
        """Wait until a slot may have become free."""
        with self._changed:
            self._changed.wait(timeout_s)

    def switch(self, segment: int, slot: Slot, *, tree: str | None = None) -> None:
        """Make `slot` the live one of a segment, durably; the slot before is free afterwards.

        A symlink aside, a rename over the live name, an fsync of its directory. Everything in the
        slot must have been flushed. Raises RunError.
        """
        link = self._link(segment, tree)
        before = self.live(segment, tree=tree) if link.is_symlink() else None
        if before is not None:
            with self._changed:
                # A power loss may still undo the rename: until it is flushed nobody writes there.
                self._taken.add(before)
        self._point(link, slot)
        self.give(slot)
        if before is not None:
            self.give(before)

    def restore(self, slots: Mapping[int, Slot], *, tree: str | None = None) -> None:
        """Make the slots of a snapshot the live ones, durably, whatever the names pointed to.

        A kill in between leaves a mixture: the caller has recorded that it is to be done again.
        """
        for segment, slot in slots.items():
            self._point(self._link(segment, tree), slot)

    def tree(self) -> str | None:
        """Return the name of the live tree; None before the first switch or without trees."""
        store = self.run_dir / "store"
        return Path(os.readlink(store)).name if store.is_symlink() else None

    def other_tree(self) -> str:
        """Return the name of the tree that is not live (before the first switch, tree a)."""
        return TREES[1] if self.tree() == TREES[0] else TREES[0]

    def switch_tree(self) -> None:
        """Make the other tree the live one, durably (the first time: tree a). Raises RunError."""
        if not self._trees:
            raise ValueError("a store that commits every step has one tree")
        replace_link(self.run_dir / "store", f"trees/{self.other_tree()}")

    def delete_free(self) -> None:
        """Delete every slot that is not in use: a finished run needs no spares."""
        with self._changed:
            for shape_class, slots in self._slots.items():
                free = set(self.free(shape_class))
                delete_slots(self.run_dir, [slot.path for slot in free])
                self._slots[shape_class] = [slot for slot in slots if slot not in free]
        flush_directory(self.run_dir / "slots")

    def _known(self, name: str) -> Slot:
        with self._changed:
            known = self._slots.get(name.rpartition("-")[0], [])
            return next(
                (slot for slot in known if slot.id == name), Slot(self.run_dir / "slots" / name)
            )

    def _point(self, link: Path, slot: Slot) -> None:
        up = len(link.parent.relative_to(self.run_dir).parts)
        replace_link(link, "../" * up + f"slots/{slot.id}")

    def _link(self, segment: int, tree: str | None) -> Path:
        return segments_directory(self.run_dir, tree) / f"{segment:03d}"

    def _used_ids(self) -> set[str]:
        """Return the names of the slots that are live, held or taken."""
        return self._live_ids().union((slot.id for slot in self._taken), *self._held.values())

    def _live_ids(self, *trees: str | None) -> set[str]:
        """Return the slots that have a live name in these trees, or in any."""
        every: tuple[str | None, ...] = TREES if self._trees else (None,)
        return {
            Path(os.readlink(link)).name
            for tree in trees or every
            for link in segments_directory(self.run_dir, tree).iterdir()
            if link.is_symlink() and link.suffix != ".next"
        }

    def _delete_unlinked(self) -> None:
        """Delete what lies on other disks without a link: a crash came between the two.

        Flushed, so that what is made there next is new, whatever becomes of this.
        """
        for disk in self._paths:
            pool = disk / POOL / run_token(self.run_dir)
            lost = [path for path in pool.glob("*") if not self._links_to(path)]
            for path in lost:
                shutil.rmtree(path)
            if lost:
                flush_file_system(pool)

    def _links_to(self, target: Path) -> bool:
        return (self.run_dir / "slots" / target.name).resolve() == target.resolve()

    def _place(self, path: Path) -> None:
        """Make sure that `path` exists: a directory, or a link to one on the next disk in turn."""
        if path.is_dir() or not self._paths:
            return
        disk = self._paths[sum(1 for _ in path.parent.iterdir()) % len(self._paths)]
        target = disk / POOL / run_token(self.run_dir) / path.name
        if target.is_dir() and any(target.iterdir()):
            raise RunError(
                f"{target} holds a slot that this run does not know: a run that was in "
                f"{self.run_dir} before left it. If that run was moved, rename {target.parent} as "
                "its own command says; if it was deleted, delete that too"
            )
        make_directory(target)
        with disk_errors(path, "make the link"):
            path.symlink_to(target)
        flush_directory(path.parent)  # before anything is in it

    def _check_link(self, path: Path) -> None:
        """Let a slot be this run's own folder on another disk, where it is now, or refuse it."""
        token, target = run_token(self.run_dir), Path(os.readlink(path))
        if target.parent.name == token and target.is_dir():
            return
        for disk in self._paths:  # the disk, or the run with its folder there, was moved
            found = disk / POOL / token / path.name
            if found.is_dir() and not found.is_symlink():
                replace_link(path, str(found))
                return
        if target.parent.name == token:
            raise RunError(
                f"the slot {path} lies in {target}, which is not there: bring its disk back (if it "
                "is mounted elsewhere now, name that place in store.paths), or start over with "
                "--fresh"
            )
        raise ConfigError(
            f"the slot {path} lies in {target}, which is not a folder of this run. If the run was "
            f"moved here with all that it has, rename {target.parent} to "
            f"{target.parent.with_name(token)} and name its disk in store.paths; a copy needs the "
            "slots of its own"
        )


def frozen_slot(run_dir: Path, segment: int) -> Slot:
    """Return where a segment's frozen parameters are kept, if it has any."""
    return Slot(run_dir / "static" / "frozen" / f"{segment:03d}")


def create_frozen(run_dir: Path, segment: int, layout: SegmentLayout, *, record_bytes: int) -> Slot:
    """Make the place of a segment's frozen parameters: written once, with a record like a slot's.

    It appears in the hierarchy as `frozen/NNN`.
    """
    ensure_group(run_dir / "static" / "frozen")
    slot = frozen_slot(run_dir, segment)
    slot.create(layout, record_bytes)
    link_static(run_dir, "frozen")
    return slot


def run_token(run_dir: Path) -> str:
    """Return the name of a run's folder on other disks: readable, and its own.

    It depends on the run's path, so that neither a copy of a run nor a run of somebody else writes
    into this one's slots.
    """
    path = run_dir.resolve()
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return f"{path.name}-{digest}"


def delete_slots(run_dir: Path, paths: Sequence[Path]) -> None:
    """Delete slots, on other disks too where they are in this run's own folder there.

    A link is durably gone before what it points to goes.
    """
    doomed = []
    links = [path for path in paths if path.is_symlink()]
    for path in paths:
        target = Path(os.readlink(path)) if path.is_symlink() else path
        own = is_pool_link(str(target), path.name) and target.parent.name == run_token(run_dir)
        if target == path or own:
            doomed.append(target)
    for link in links:
        link.unlink()
    if links:
        flush_directory(links[0].parent)
    for path in doomed:
        if path.exists():
            shutil.rmtree(path)
