"""The commit of a step by two ranks, enumerated: after `ranks.commit` and `ranks.recovery`.

Each rank has a disk of its own with two trees. In any state any of them may be killed, or lose
power, each by itself; the others go as far as they come without it. From everything that this
leaves the ranks start again, and are crashed again, until nothing new is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Any, NamedTuple

from swaptrain.errors import DamagedStoreError
from swaptrain.ranks.recovery import Standing, common_step
from tests.protocol.disk import Disk, Image, Place, Undecided
from tests.protocol.run import LostError

__all__ = ["ALL_JOINT_RULES", "JointReport", "JointRule", "check_joint"]


class JointRule(StrEnum):
    """One rule of the commit by all ranks."""

    PREPARED = "rank 0 switches when every rank has the step on its disk"
    TREE_FLUSHED = "a tree is flushed before its rank says so"
    ROOT_FLUSHED = "and so is its root"
    DURABLE = "rank 0 says that it has switched when that is durable"
    AWAITED = "the others write to the tree of the step before when rank 0 has said so"
    OTHER_TREE = "recovery takes whichever tree has the step of rank 0"
    FLUSH_FIRST = "a start flushes before rank 0 names its step"


ALL_JOINT_RULES = frozenset(JointRule)

Op = tuple[Any, ...]
"""`write` place content tears, `flush` place, `say` message, `wait` messages, `counts` step."""


class _State(NamedTuple):
    ops: tuple[tuple[Op, ...], ...]
    """By rank: what is left of its step."""
    steps: tuple[int, ...]
    """By rank: the step that it does."""
    trees: tuple[str, ...]
    """By rank: its live tree."""
    said: frozenset[tuple[Any, ...]]
    image: Image
    counted: int
    """The last step that rank 0 has said to be committed."""


@dataclass
class JointReport:
    """What an enumeration found."""

    states: int = 0
    recoveries: int = 0
    finished: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    whole: bool = True
    """Whether it came to its end within the limit."""


class _JointChecker:
    def __init__(self, rules: frozenset[JointRule], *, ranks: int, steps: int, limit: int) -> None:
        self.rules, self.count, self.last, self.limit = rules, ranks, steps, limit
        places: list[Place] = []
        for rank in range(ranks):
            places.append(("store", rank))
            for tree in "ab":
                places += [(what, rank, tree) for what in ("state", "root")]
        self.disk = Disk.of(places, {place: place[1] for place in places})
        self.report = JointReport()
        self.seen: set[_State] = set()
        self.stack: list[_State] = []
        self.crashed: set[tuple[Image, int]] = set()

    def run(self) -> JointReport:
        self.crash(self.disk.image(dict.fromkeys(self.disk.places)), -1)
        while self.stack:
            if len(self.seen) > self.limit:
                self.report.whole = False
                break
            state = self.stack.pop()
            for rank in range(self.count):
                for successor in self.moved(state, rank):
                    if successor not in self.seen:
                        self.seen.add(successor)
                        self.stack.append(successor)
            if not any(state.ops):
                self.finished(state)
        self.report.states = len(self.seen)
        return self.report

    def moved(self, state: _State, rank: int) -> Iterator[_State]:
        """Yield what the next operation of a rank leads to, and crash in and behind it."""
        if not state.ops[rank]:
            return
        op, *left = state.ops[rank]
        after = state._replace(ops=_with(state.ops, rank, tuple(left)))
        if op[0] == "wait":
            if not state.said.issuperset(op[1]):
                return
        elif op[0] == "say":
            after = after._replace(said=state.said | {op[1]})
            if op[1][0] == "committed":
                after = after._replace(counted=max(state.counted, op[1][1]))
        elif op[0] == "next":
            step = state.steps[rank] + 1
            tree = _other(state.trees[rank]) if state.steps[rank] else state.trees[rank]
            ops = self.step(rank, step, tree) if step <= self.last else ()
            after = after._replace(
                ops=_with(after.ops, rank, ops),
                steps=_with(state.steps, rank, step),
                trees=_with(state.trees, rank, tree),
            )
        elif op[0] == "write":
            after = after._replace(image=self.disk.write(state.image, op[1], op[2], tears=op[3]))
        else:
            after = after._replace(image=self.disk.flush(state.image, [op[1]]))
        if after.image != state.image or op[0] == "say":
            self.crash_all(after)
        yield after

    def crash_all(self, state: _State) -> None:
        """End all ranks here: each is killed, or loses power."""
        for powerless in product((False, True), repeat=self.count):
            image = state.image
            for rank, loses in enumerate(powerless):
                if loses:
                    lost = self.disk.lose_power(image)
                    mine = [place[1] == rank for place in self.disk.places]
                    image = tuple(
                        there if own else cell
                        for own, cell, there in zip(mine, image, lost, strict=True)
                    )
            self.crash(image, state.counted)

    def crash(self, image: Image, counted: int) -> None:
        """Start over from what is left, with each content that recovery may find."""
        if JointRule.FLUSH_FIRST in self.rules:
            image = self.disk.flush_devices(image, range(self.count))
        images = [image]
        while images:
            image = images.pop()
            if (image, counted) in self.crashed:
                continue
            self.crashed.add((image, counted))
            self.report.recoveries += 1
            try:
                start = self.recovered(image, counted)
            except Undecided as undecided:
                images += self.disk.decide(image, undecided.index)
            except (LostError, DamagedStoreError) as error:
                self.report.lost[str(error)] += 1
            else:
                if start not in self.seen:
                    self.seen.add(start)
                    self.stack.append(start)

    def recovered(self, image: Image, counted: int) -> _State:
        """Return where the ranks go on; raises LostError where they cannot."""
        standings, live = [], []
        for rank in range(self.count):
            tree = self.disk.read(image, ("store", rank))
            live.append(tree)
            other = "a" if tree is None else _other(str(tree))
            own = None if tree is None else self.root(image, rank, str(tree))
            seen = self.root(image, rank, other) if JointRule.OTHER_TREE in self.rules else None
            standings.append(Standing(own, seen))
        step = common_step(standings, [f"rank {rank}" for rank in range(self.count)])
        if (-1 if step is None else step) < counted:
            raise LostError(f"step {counted} had counted, and the run is at {step}")
        scripts, trees = [], []
        for rank in range(self.count):
            ops: list[Op] = []
            tree = live[rank]
            if step is None:
                ops += [*_link(rank, None), *self.create(rank)] if tree else self.create(rank)
                scripts.append(tuple(ops))
                trees.append("a")
                continue
            if standings[rank].live != step:
                tree = "a" if tree is None else _other(str(tree))
                ops += _link(rank, tree)
            found = self.disk.read(image, ("state", rank, str(tree)))
            if found != ("state", step):
                raise LostError(f"rank {rank} has {found} in the tree of step {step}")
            scripts.append((*ops, *self.step(rank, step + 1, str(tree))))
            trees.append(str(tree))
        first = 0 if step is None else step + 1
        return _State(
            tuple(scripts), (first,) * self.count, tuple(trees), frozenset(), image, counted
        )

    def root(self, image: Image, rank: int, tree: str) -> int | None:
        found: Any = self.disk.read(image, ("root", rank, tree))
        return None if found is None else found[1]

    def create(self, rank: int) -> tuple[Op, ...]:
        """Return the creation of a store, and what follows."""
        return (*self.written(rank, 0, "a"), *self.switched(rank, 0, "a"), ("next",))

    def step(self, rank: int, step: int, tree: str) -> tuple[Op, ...]:
        """Return a step that is written to the tree which is not live, and its commit."""
        if step > self.last:
            return ()
        other = _other(tree)
        return (*self.written(rank, step, other), *self.switched(rank, step, other), ("next",))

    def written(self, rank: int, step: int, tree: str) -> Iterator[Op]:
        yield ("write", ("state", rank, tree), ("state", step), True)
        if JointRule.TREE_FLUSHED in self.rules:
            yield ("flush", ("state", rank, tree))
        yield ("write", ("root", rank, tree), ("root", step), False)
        if JointRule.ROOT_FLUSHED in self.rules:
            yield ("flush", ("root", rank, tree))

    def switched(self, rank: int, step: int, tree: str) -> Iterator[Op]:
        """Yield the two phases."""
        others = frozenset(("prepared", step, other) for other in range(self.count))
        zeroth = rank == 0
        link = _link(rank, tree)
        yield ("say", ("prepared", step, rank))
        if JointRule.PREPARED in self.rules:
            yield ("wait", others)
        if zeroth and JointRule.DURABLE in self.rules:
            yield from (*link, ("say", ("committed", step)))
        elif zeroth:
            yield from (link[0], ("say", ("committed", step)), link[1])
        else:
            if JointRule.AWAITED in self.rules:
                yield ("wait", frozenset({("committed", step)}))
            yield from link

    def finished(self, state: _State) -> None:
        self.report.finished += 1
        for rank in range(self.count):
            tree = str(self.disk.read(state.image, ("store", rank)))
            if self.disk.read(state.image, ("state", rank, tree)) != ("state", self.last):
                self.report.lost["a finished run has another state"] += 1


def _link(rank: int, tree: object) -> tuple[Op, Op]:
    place = ("store", rank)
    return ("write", place, tree, False), ("flush", place)


def _other(tree: str) -> str:
    return "b" if tree == "a" else "a"


def _with(row: tuple[Any, ...], rank: int, value: Any) -> tuple[Any, ...]:
    return (*row[:rank], value, *row[rank + 1 :])


def check_joint(
    rules: frozenset[JointRule] = ALL_JOINT_RULES,
    *,
    ranks: int = 2,
    steps: int = 3,
    limit: int = 200_000,
) -> JointReport:
    """Enumerate the commits of a run of several ranks, at most so many states."""
    return _JointChecker(rules, ranks=ranks, steps=steps, limit=limit).run()
