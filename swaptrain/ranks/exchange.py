"""Carries out SHARE and COLLECT: weights to all ranks, sums to the rank that owns the segment.

Every exchange is begun on the main thread, in the order of the program, which is that of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Instruction, ObjectKey, Operation
from swaptrain.program.ranks import PIECE_BYTES
from swaptrain.program.sharing import exchanged
from swaptrain.ranks.group import Group

__all__ = ["Exchange"]

_TRIED_BYTES = 8 << 20


class Exchange:
    """Moves the content of slabs between the ranks."""

    def __init__(self, group: Group) -> None:
        self._group, self._ranks = group, group.ranks
        self.moved_bytes = 0
        """That this rank has sent and received, cumulative."""
        self.wait_s = 0.0
        """Seconds in which the main line waited for other ranks, or added their sums."""

    def speed(self) -> float:
        """Return the bytes a second that the slowest rank gets of another one. All ranks call it.

        Of a few MiB, the second time: enough for a forecast.
        """
        tensor = torch.zeros(_TRIED_BYTES, dtype=torch.uint8)
        taken_s = 0.0
        for root in (0, 1, 0, 1):
            begun = time.perf_counter()
            self._group.broadcast(tensor, root)()
            taken_s = time.perf_counter() - begun
        return _TRIED_BYTES / self._group.largest(taken_s)

    def begin(
        self, instruction: Instruction, slabs: Mapping[ObjectKey, Slab]
    ) -> list[Callable[[], None]]:
        """Begin an exchange; return what has to be called to end it, in this order.

        Until then nobody may change what it reads, nor read what it writes or changes.
        """
        if instruction.operation is Operation.SHARE:
            return [self._share(key, slabs[key]) for key in exchanged(instruction)]
        (key,) = exchanged(instruction)
        sums = slabs[key].tensor(torch.float32, slabs[key].nbytes // 4)
        if instruction.changes:
            return [lambda: self._add(sums)]
        owner = self._ranks.owner(key.segment)
        self.moved_bytes += sums.nbytes
        return [self._group.send(piece, owner, tag) for tag, piece in enumerate(_pieces(sums))]

    def _share(self, key: ObjectKey, slab: Slab) -> Callable[[], None]:
        owner = self._ranks.owner(key.segment)
        self.moved_bytes += slab.nbytes
        return self._group.broadcast(slab.tensor(torch.uint8, slab.nbytes), owner)

    def _add(self, own: Tensor) -> None:
        """Add the sums of all ranks in the order of the ranks: S_0 + S_1 + ..., float32, [n].

        An addition of two numbers has one result whichever comes first: so the own sums may be the
        second operand, after the sum of those before.
        """
        rank, count = self._ranks.rank, self._ranks.count
        pieces = list(_pieces(own))
        others = [other for other in range(count) if other != rank]
        coming = [(tag, other) for tag in range(len(pieces)) for other in others]
        staging = [torch.empty(PIECE_BYTES // 4) for _ in range(2)]
        before = torch.empty(PIECE_BYTES // 4) if rank > 1 else None
        self.moved_bytes += own.nbytes * len(others)

        def begin(number: int) -> tuple[Tensor, Callable[[], None]]:
            tag, other = coming[number]
            place = staging[number % 2][: pieces[tag].numel()]
            return place, self._group.receive(place, other, tag)

        begun = begin(0)
        for number, (tag, other) in enumerate(coming):
            arrived, wait = begun
            wait()
            if number + 1 < len(coming):
                begun = begin(number + 1)
            mine = pieces[tag]
            if other > rank or rank == 1:
                mine.add_(arrived)
                continue
            assert before is not None, "more than one rank comes before this one"
            sum_before = before[: mine.numel()]
            if other == 0:
                sum_before.copy_(arrived)
            else:
                sum_before.add_(arrived)
            if other == rank - 1:
                mine.add_(sum_before)


def _pieces(sums: Tensor) -> Iterator[Tensor]:
    """Yield the pieces of a slab of sums, [n], in which they travel."""
    yield from torch.split(sums, PIECE_BYTES // 4)
