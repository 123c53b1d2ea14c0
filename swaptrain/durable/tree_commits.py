"""The commit of a whole store, with the unit `step`: two trees, one of them live."""

from __future__ import annotations

from collections.abc import Callable

from swaptrain.durable.commits import Commits
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.errors import DamagedStoreError
from swaptrain.store.disk.durable_files import flush_directory
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.root import RootRecord, create_root
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.slots import Slots

__all__ = ["Trees"]


class Trees:
    """Between commits, state that leaves memory goes to the tree that is not live.

    The committing step writes every segment there, then the root, and switches. Recovery reads the
    live tree only. `last_step`, the run's, is committed whatever its number, and so is every step
    of which a snapshot is made, each `keep_every` steps.
    """

    def __init__(
        self,
        layouts: Layouts,
        slots: Slots,
        backing: DiskBacking,
        commits: Commits,
        root: RootRecord,
        *,
        last_step: int,
        keep_every: int | None,
        together: Callable[[int, Callable[[], None]], None] = lambda _, switch: switch(),
    ) -> None:
        """`together` calls the switch to a step when all ranks have that step on their disks."""
        self._together = together
        self._layouts, self._slots, self._backing = layouts, slots, backing
        self._commits, self._root = commits, root
        self._last_step, self._keep_every = last_step, keep_every
        self._included: int | None = None
        self._point()

    @property
    def step(self) -> int:
        """The step of the live tree."""
        return self._root.step

    def include(self, step: int) -> None:
        """Let the store be committed after `step` too, though it was not planned."""
        self._included = step

    def is_commit_step(self, step: int) -> bool:
        """Whether the store is committed after `step`."""
        kept = self._keep_every is not None and step % self._keep_every == 0
        planned = step % self._root.commit_every == 0 or step == self._last_step
        return planned or kept or step == self._included

    def switch(self, step: int) -> None:
        """Make the tree that holds `step` the live one; every segment was written to it."""
        # Each slot is flushed before the root names their step. Were the root first, a power loss
        # after the switch could find a live tree with segments of two steps.
        self._commits.drain()
        self._root = self._root.model_copy(update={"step": step})
        create_root(self._slots.run_dir, self._root, tree=self._slots.other_tree())
        # The root before the switch: else a kill in between finds a live tree whose root is of
        # another step than its segments.
        self._together(step, self._slots.switch_tree)
        # The switch before anything is spilled: else that would go into the tree which is live.
        self._point()

    def finish(self) -> None:
        """Let go of the slots of the tree that is not live; a later opening takes new ones."""
        paths, other = RunPaths(self._slots.run_dir), self._slots.other_tree()
        for k in self._layouts.state:
            paths.live_link(k, other).unlink(missing_ok=True)
        flush_directory(paths.segments(other))

    def _point(self) -> None:
        """Tell the backing where state is read from and where it is spilled to."""
        for k in self._layouts.state:
            live = self._slots.live(k, tree=self._slots.tree())
            self._backing.point(k, live, self._scratch(k))

    def _scratch(self, k: int) -> Slot:
        """Return a segment's slot in the other tree, where it is written next.

        Another one where a snapshot holds it, or where a finished run has let go of it.
        """
        other = self._slots.other_tree()
        try:
            slot = self._slots.live(k, tree=other)
            if not self._slots.is_held(slot):
                return slot
        except DamagedStoreError:
            pass  # there is none
        fresh = self._slots.take(self._layouts.state[k].shape_class)
        assert fresh is not None, "every segment has a slot in each tree, and one per snapshot"
        self._slots.switch(k, fresh, tree=other)
        return fresh
