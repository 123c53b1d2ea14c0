"""The commit of a step by all ranks: rank 0's switch of its tree is the one moment.

Every rank has written the step to its other tree, root included, and flushed it. When all have,
rank 0 switches its tree: the step counts. When that is durable the others switch theirs, and only
then does anybody write to the trees of the step before: a rank that was killed before its own
switch still has both, and takes the one that rank 0 names (`recovery`).
"""

from __future__ import annotations

from collections.abc import Callable

from swaptrain.errors import RunError
from swaptrain.ranks.group import Group

__all__ = ["JointCommit"]


class JointCommit:
    """Switches the trees of all ranks to a step."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def switch(self, step: int, switch: Callable[[], None]) -> None:
        """Call `switch`, which is durable when it returns, in its turn; `step` is flushed here.

        Raises RunError where a rank is missing: then this one may or may not have switched.
        """
        # Every rank is prepared. Were rank 0 to switch before, a kill could find it at a step that
        # another rank does not have.
        prepared = [int(row[0]) for row in self._group.gather_floats([step])]
        if set(prepared) != {step}:
            raise RunError(f"the ranks would commit different steps: {prepared}")
        if not self._group.ranks.rank:
            switch()
        # Rank 0's switch is durable. Were another rank to go on before, it would write the next
        # step over the one that rank 0 may still be at after a power loss.
        self._group.barrier()
        if self._group.ranks.rank:
            switch()
