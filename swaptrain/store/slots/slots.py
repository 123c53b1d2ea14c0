"""The slots of a run: which are live, which are held or free, and the switch between them."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.store.disk.durable_files import (
    flush_directory,
    make_directory,
    replace_link,
    run_error,
)
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.root import ensure_group
from swaptrain.store.paths import NEXT, TREES, RunPaths, link_text, other_tree, slot_name
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.slot_disks import SlotDisks, delete_slots
from swaptrain.store.slots.snapshot_links import held_slots, snapshot_paths

__all__ = ["Slots"]


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
        self._paths = RunPaths(self.run_dir)
        self._disks = SlotDisks(self.run_dir, paths or ())
        self._trees = trees
        self._slots: dict[str, list[Slot]] = {}
        self._taken: set[Slot] = set()
        self._held = {
            path.name: frozenset(held_slots(path).values()) for path in snapshot_paths(self.run_dir)
        }
        """Names of slots, by the snapshot that holds them."""
        self._changed = threading.Condition(threading.RLock())
        for tree in TREES if trees else (None,):
            ensure_group(self._paths.segments(tree))
        make_directory(self._paths.slots)

    def create(self, layout: SegmentLayout, count: int, *, record_bytes: int) -> list[Slot]:
        """Make sure that there are `count` slots of the layout's shape class; return them.

        `record_bytes` is the largest `record_size` of the segments of the class. Doing it again,
        after a crash or when a run is opened, adds what is missing and deletes free slots beyond
        `count`; a slot in use stays as it is. Raises RunError (disk full).
        """
        shape_class = layout.shape_class
        folder = self._paths.slots
        self._disks.mend_links()
        present = {path.name for path in folder.glob(f"{shape_class}-*")}
        used_ids = self._used_ids()
        used, unused = present & used_ids, sorted(present - used_ids)
        free_count = max(0, count - len(used))
        numbers = (slot_name(shape_class, number) for number in itertools.count())
        new = (name for name in numbers if name not in present | used_ids)
        free = [*unused[:free_count], *itertools.islice(new, max(0, free_count - len(unused)))]
        delete_slots(self.run_dir, [folder / name for name in unused[free_count:]])
        self._disks.delete_unlinked()
        # What the last commit or a snapshot left is not touched: what is missing is not made up.
        kept = self._live_ids((self.tree() or TREES[0]) if self._trees else None).union(
            *self._held.values()
        )
        slots = [Slot(folder / name) for name in sorted([*used, *free])]
        for slot in slots:
            self._disks.place(slot.path, layout.nbytes)
            if slot.id not in kept:
                slot.create(layout, record_bytes, flush=False)
        self._disks.flush()
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
        return self._paths.live_tree()

    def other_tree(self) -> str:
        """Return the name of the tree that is not live (before the first switch, tree a)."""
        return other_tree(self.tree())

    def switch_tree(self) -> None:
        """Make the other tree the live one, durably (the first time: tree a). Raises RunError."""
        if not self._trees:
            raise ValueError("a store that commits segments has one tree")
        store = self._paths.store
        replace_link(store, link_text(store, self._paths.hierarchy(self.other_tree())))

    def delete_free(self) -> None:
        """Delete every slot that is not in use: a finished run needs no free ones."""
        with self._changed:
            for shape_class, slots in self._slots.items():
                free = set(self.free(shape_class))
                delete_slots(self.run_dir, [slot.path for slot in free])
                self._slots[shape_class] = [slot for slot in slots if slot not in free]
        flush_directory(self._paths.slots)

    def _known(self, name: str) -> Slot:
        with self._changed:
            known = self._slots.get(name.rpartition("-")[0], [])
            fresh = Slot(self._paths.slot(name))
            return next((slot for slot in known if slot.id == name), fresh)

    def _point(self, link: Path, slot: Slot) -> None:
        replace_link(link, link_text(link, self._paths.slot(slot.id)))

    def _link(self, segment: int, tree: str | None) -> Path:
        return self._paths.live_link(segment, tree)

    def _used_ids(self) -> set[str]:
        """Return the names of the slots that are live, held or taken."""
        return self._live_ids().union((slot.id for slot in self._taken), *self._held.values())

    def _live_ids(self, *trees: str | None) -> set[str]:
        """Return the slots that have a live name in these trees, or in any."""
        every: tuple[str | None, ...] = TREES if self._trees else (None,)
        ids: set[str] = set()
        for tree in trees or every:
            with os.scandir(self._paths.segments(tree)) as entries:
                ids.update(
                    os.readlink(entry.path).rpartition("/")[2]
                    for entry in entries
                    if entry.is_symlink() and not entry.name.endswith(NEXT)
                )
        return ids
