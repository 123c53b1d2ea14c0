"""A small run: what it is, where in it a process may begin, and what the process then does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swaptrain.program.instructions import ObjectKey
from swaptrain.program.step import StepBuilder
from tests.protocol.contents import Ledger
from tests.protocol.disk import Place

__all__ = ["METRICS", "ROOT", "STORE", "Context", "LostError", "Op", "Scenario", "Script"]

Op = tuple[Any, ...]
"""`write` places contents tears, `flush` places, `take` k, `rename` k, `give` k, `submit` ops,
`barrier`, `done` what k. Places of the slot that a commit of segment k writes are `new` k part."""

METRICS: Place = ("metrics",)
ROOT: Place = ("root",)
STORE: Place = ("store",)


class LostError(Exception):
    """A state from which the run cannot go on to the same bits."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A small run."""

    name: str
    builder: StepBuilder
    steps: int = 2
    commit_every: int = 1
    whole: bool = False
    """Commits the store as a whole also where that is in each step."""
    free_slots: int = 1
    """Slots that each shape class has beyond its segments."""
    alike: bool = True
    """Whether all segments are of one shape class."""
    disks: int = 1
    """Slots lie on them in turn; all else on the first."""
    spills: bool = False
    """Whether the pool is so small that every gradient and sum leaves memory at once."""
    values: bool = False
    """Whether what forwards make is kept, unflushed, and used by the next process."""
    lag: int = 1
    """Segments whose backward a kill may repeat: store.commit.lag."""
    flushes: bool = False
    """Whether deferred updates are done behind each step, as for an evaluation."""

    def __str__(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")

    @property
    def stored(self) -> list[int]:
        """The segments that have state."""
        return [s.index for s in self.builder.model.segments if self.builder.state_arrays[s.index]]

    @property
    def is_whole(self) -> bool:
        """Whether the store is committed as a whole, in one of two trees."""
        return self.whole or self.commit_every > 1

    @property
    def journal(self) -> bool:
        """Whether finished gradients lie beside the slots."""
        return self.builder.deferred and not self.is_whole

    def shape_class(self, k: int) -> str:
        return "a" if self.alike else f"c{k}"

    def slots(self) -> dict[str, list[str]]:
        """Return the slots' names by shape class."""
        members: dict[str, list[int]] = {}
        for k in self.stored:
            members.setdefault(self.shape_class(k), []).append(k)
        return {
            name: [f"{name}-{n}" for n in range(len(ks) + self.free_slots)]
            for name, ks in members.items()
        }


@dataclass(frozen=True)
class Context:
    """All that the rest of a run depends on, at the start of a step."""

    step: int
    state: tuple[tuple[ObjectKey, int], ...]
    tree: str = "a"
    top: int | None = None
    pending: tuple[int, ...] = ()
    sums: tuple[tuple[ObjectKey, int], ...] = ()
    """Finished gradients whose update is pending."""
    awaited: frozenset[ObjectKey] = frozenset()
    present: tuple[tuple[ObjectKey, int], ...] = ()
    """What an earlier process left of the step's forwards."""
    handoff: tuple[tuple[ObjectKey, int], ...] = ()
    losses: tuple[tuple[int, int], ...] = ()
    norms: tuple[tuple[str, int], ...] = ()
    cut_metrics: int | None = None
    """The lines that metrics.jsonl has to have, where a process begins that finds others."""

    def ledger(self) -> Ledger:
        return Ledger(dict(self.losses), dict(self.norms))


@dataclass(frozen=True, eq=False)
class Script:
    """What the main thread does from the start of a step to its end."""

    ops: tuple[Op, ...]
    then: Context | None
    """What follows; None at the end of the run."""
    step: int = 0
    forwards: frozenset[int] = frozenset()
    """The segments whose forward it runs."""
