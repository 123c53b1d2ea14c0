"""The processes of a run that share one model: who owns a segment, and whose a micro-batch is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ALONE", "MOST_RANKS", "PIECE_BYTES", "STAGING_BYTES", "Ranks"]


@dataclass(frozen=True)
class Ranks:
    """One of several processes that train one model together; alone, where there is one."""

    rank: int = 0
    """From 0."""
    count: int = 1

    def owner(self, segment: int) -> int:
        """Return the rank that has a segment's state on its disk, and updates it."""
        return segment % self.count

    def owns(self, segment: int) -> bool:
        """Whether this rank has a segment's state."""
        return self.owner(segment) == self.rank

    def owners_of_none(self, segments: Iterable[int]) -> list[int]:
        """Return the ranks that own none of these segments."""
        owners = {self.owner(segment) for segment in segments}
        return [rank for rank in range(self.count) if rank not in owners]

    def divide(self, micro_batches: int) -> bool:
        """Whether each rank gets as many of a step's micro-batches as every other one."""
        return micro_batches % self.count == 0

    def share(self, micro_batches: int) -> int:
        """Return how many of a step's micro-batches each rank computes."""
        return micro_batches // self.count

    def first(self, micro_batches: int) -> int:
        """Return the first of a step's micro-batches that this rank computes; the next follow."""
        return self.rank * self.share(micro_batches)


MOST_RANKS = 999
"""Of one run: the name of a rank's directory has three digits."""
PIECE_BYTES = 4 << 20
"""Of sums on their way from one rank to another: a multiple of a page."""
STAGING_BYTES = 3 * PIECE_BYTES
"""What the owner of a segment takes while it adds the sums of others, beside its own."""
ALONE = Ranks()
"""A run of one process."""
