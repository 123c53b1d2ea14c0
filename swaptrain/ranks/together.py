"""What the ranks of a run find together: the losses and norms of a step, and whether to stop."""

from __future__ import annotations

from collections.abc import Sequence

from swaptrain.durable.ledger import Ledger
from swaptrain.ranks.commit import JointCommit
from swaptrain.ranks.exchange import Exchange
from swaptrain.ranks.group import Group

__all__ = ["Together"]


class Together:
    """The other ranks, as the steps of a run need them."""

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        """`names` are those of all parameters, in the model's order."""
        self.group, self.ranks = group, group.ranks
        self.exchange, self.commit = Exchange(group), JointCommit(group)
        self._places = {name: place for place, name in enumerate(names)}

    def merge_numbers(self, ledger: Ledger, beside: dict[int, list[float]], count: int) -> None:
        """Give all ranks the losses of `count` micro-batches, and the numbers beside them."""
        own = dict(ledger.losses)
        ledger.losses.clear()
        ledger.losses.update(self.group.merge(own, count))
        widest = int(self.group.largest(max(map(len, beside.values()), default=0)))
        for column in range(widest):
            rows = {m: row[column] for m, row in beside.items() if column < len(row)}
            for m, number in self.group.merge(rows, count).items():
                if column >= len(beside.setdefault(m, [])):
                    beside[m].append(number)

    def merge_norms(self, ledger: Ledger) -> None:
        """Give all ranks the norms of the gradients of all parameters."""
        own = {self._places[name]: norm for name, norm in ledger.norms.items()}
        found = self.group.merge(own, len(self._places))
        ledger.norms.update({n: found[p] for n, p in self._places.items() if p in found})

    def any(self, said: bool) -> bool:
        """Whether any rank says so."""
        return self.group.largest(float(said)) > 0
