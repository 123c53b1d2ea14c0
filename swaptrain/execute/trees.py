"""The commit of a whole store, for commit_every > 1: two trees, one of them live."""

from __future__ import annotations

from dataclasses import replace

from swaptrain.execute.commits import Commits
from swaptrain.execute.home import StoreHome
from swaptrain.memory.tier import Tier
from swaptrain.store.root import RootRecord, create_root
from swaptrain.store.slots import TREES, Slots

__all__ = ["Trees"]


class Trees:
    """Between commits, state that leaves memory goes to the tree that is not live.

    The committing step writes every segment there, then the root, and switches. Recovery reads the
    live tree only.
    """

    def __init__(
        self, slots: Slots, home: StoreHome, tier: Tier, commits: Commits, root: RootRecord
    ) -> None:
        self._slots, self._home, self._tier = slots, home, tier
        self._commits, self._root = commits, root
        self._point()

    def commits(self, step: int) -> bool:
        """Whether the store is committed behind `step`."""
        return step % self._root.commit_every == 0 or step == self.last_step

    last_step: int = -1
    """The run's last step, which is committed whatever its number."""

    def switch(self, step: int) -> None:
        """Make the tree that holds `step` the live one; every segment was written to it."""
        self._commits.drain()
        self._root = replace(self._root, step=step)
        create_root(self._slots.run_dir, self._root, tree=self._other())
        self._slots.switch_tree()
        self._home.switched()
        self._point()

    def _other(self) -> str:
        return TREES[1] if self._slots.tree() == TREES[0] else TREES[0]

    def _point(self) -> None:
        """Tell the home where state is read from and where it is spilled to."""
        for k in self._home.slots:
            self._home.slots[k] = self._slots.live(k, tree=self._slots.tree())
            self._home.scratch[k] = self._slots.live(k, tree=self._other())
