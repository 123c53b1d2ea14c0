"""The disk operations that instructions lead to.

After `durable.commits`, `durable.handoff`, `durable.disk_backing`, `durable.activations`,
`durable.tree_commits` and `store.slots.commit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from tests.protocol.contents import Memory
from tests.protocol.disk import Place
from tests.protocol.places import Places
from tests.protocol.rules import Rule
from tests.protocol.run import STORE, Op, Scenario

__all__ = ["DiskOps", "Step", "flush", "rename", "write"]


@dataclass
class Step:
    """A step while its script is made."""

    memory: Memory
    version: int
    ops: list[Op] = field(default_factory=list)
    live: dict[ObjectKey, None] = field(default_factory=dict)
    submitted: set[ObjectKey] = field(default_factory=set)
    spilled: set[ObjectKey] = field(default_factory=set)
    awaited: set[ObjectKey] = field(default_factory=set)
    tree: str = "a"
    rewrite: bool = False
    """Whether updates write to the other tree, which is then switched to."""


class DiskOps:
    """Appends what the main thread does for an instruction to the operations of a step."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        self.scenario, self.rules = scenario, rules
        self.builder, self.model = scenario.builder, scenario.builder.model
        self.places = Places(scenario, rules)

    def count(self, now: Step, instruction: Instruction, *, barrier: bool) -> None:
        """Count an instruction: a barrier, when what was left before it is durable."""
        if not self.scenario.is_whole and barrier and Rule.ONE_SEGMENT in self.rules:
            now.ops.append(("barrier",))
        k = instruction.segment
        if instruction.operation is Operation.FORWARD:
            now.ops.append(("done", "forward", k))
        if instruction.operation in (Operation.TURN, Operation.BACKWARD):
            now.ops.append(("done", "backward", k))

    def observe(self, now: Step, instruction: Instruction) -> None:
        """Follow which gradients are alive."""
        made = (key for key in instruction.writes if key.kind is Kind.GRADIENT)
        now.live.update(dict.fromkeys(made))
        for key in instruction.frees:
            now.live.pop(key, None)
            now.submitted.discard(key)

    def commit(self, now: Step, k: int, version: int, token: int, ledger: tuple[Any, Any]) -> None:
        """Commit a segment's chunks, which are `token`, with the hand-off."""
        live, in_memory = self._handoff(now)
        record = ("record", k, version, token, live, *ledger)
        chunks, place = ("new", k, "chunks"), ("new", k, "record")
        now.ops += [("take", k), write({chunks: token})]
        job: list[Op] = []
        if in_memory and Rule.HANDOFF in self.rules:
            target = job if Rule.HANDOFF_WAITS in self.rules else now.ops
            target.append(write(in_memory))
            job.append(flush(in_memory, Rule.HANDOFF_FLUSHED, self.rules))
        job.append(flush([chunks], Rule.CHUNKS_FLUSHED, self.rules))
        job += [write({place: record}), flush([place], Rule.RECORD_FLUSHED, self.rules)]
        job.append(("rename", k))
        if Rule.SWITCH_FLUSHED not in self.rules:
            job.append(("give", k))
        job.append(flush([("live", j) for j in self.scenario.stored]))
        job += [("give", k)]
        now.ops.append(("submit", tuple(job)))

    def _handoff(self, now: Step) -> tuple[tuple[tuple[ObjectKey, int], ...], dict[Place, Any]]:
        """Return what a commit hands on, and the part of it that it writes."""
        live = tuple((key, now.memory.objects[key]) for key in now.live)
        in_memory = {
            self.places.row(key): content
            for key, content in live
            if key not in now.submitted and key not in now.spilled
        }
        now.submitted.update(key for key, _ in live)
        return live, in_memory

    def write_tree(
        self, now: Step, k: int, version: int, token: int, ledger: tuple[Any, Any]
    ) -> None:
        """Write a segment to the tree that is not live; durably in a step that commits."""
        tree = _other(now.tree)
        chunks, place = ("tree", tree, k, "chunks"), ("tree", tree, k, "record")
        if now.rewrite:
            job = (
                write({chunks: token}),
                flush([chunks], Rule.TREE_FLUSHED, self.rules),
                write({place: ("record", k, version, token, (), *ledger)}),
                flush([place], Rule.TREE_FLUSHED, self.rules),
            )
            now.ops.append(("submit", job))
        elif self.scenario.spills:
            now.ops.append(write({chunks: token}))

    def switch_tree(self, now: Step, step: int) -> str:
        """Make the other tree, which holds `step`, the live one; return it."""
        tree = _other(now.tree)
        root: Place = ("tree", tree, "root")
        now.ops += [
            ("barrier",),
            rename({root: ("root", step)}),
            flush([root], Rule.ROOT_FLUSHED, self.rules),
            rename({STORE: tree}),
            flush([STORE]),
        ]
        return tree

    def finish_gradient(self, now: Step, instruction: Instruction) -> None:
        """Write a finished gradient, and the buffers that belong to it, with the hand-off."""
        k = instruction.segment
        contents = {}
        places: dict[Place, Any] = {}
        for key in instruction.reads:
            if key.kind is Kind.STATE and Rule.BUFFERS_FINISHED not in self.rules:
                continue
            contents[key] = now.memory.objects[key]
            places[self.places.finished_place(key)] = contents[key]
        losses, norms = now.memory.ledger.frozen()
        norms = self.owned(k, norms)
        live, in_memory = self._handoff(now)
        if Rule.HANDOFF not in self.rules:
            in_memory = {}
        record = ("finished", k, now.version, tuple(contents.items()), live, losses, norms)
        place: Place = ("finished", k, "record")
        job = (
            write({**places, **in_memory}),
            flush(places, Rule.GRADIENT_FLUSHED, self.rules),
            flush(in_memory, Rule.HANDOFF_FLUSHED, self.rules),
            write({place: record}),
            flush([place], Rule.GRADIENT_FLUSHED, self.rules),
        )
        now.ops.append(("submit", job))
        if Rule.GRADIENT_AWAITED in self.rules:
            now.awaited.update(key for key in contents if key.kind is Kind.ACCUMULATOR)

    def save(self, now: Step, instruction: Instruction) -> None:
        """Write what a forward made, and the buffers behind the last one of its segment."""
        keys = [key for key in instruction.writes if key.kind is Kind.VALUE]
        if instruction.micro_batch == self.builder.micro_batches - 1:
            keys += [key for key in instruction.changes if key.kind is Kind.STATE]
        contents = {
            self.places.value_place(key): ("value", now.version, now.memory.objects[key])
            for key in keys
        }
        now.ops.append(write(contents))

    def spill(self, now: Step, instruction: Instruction) -> None:
        """Write what the instruction made and no commit has taken, as a full pool does."""
        # Sums first: nothing says which of them a full pool drives out first.
        for key in sorted((*instruction.writes, *instruction.changes)):
            if key in instruction.frees or key.kind is Kind.VALUE:
                continue
            if key.kind is Kind.STATE:
                if self.scenario.values and instruction.operation is Operation.FORWARD:
                    place = self.places.value_place(key)
                    now.ops.append(write({place: ("spilled", now.memory.objects[key])}))
            elif key.kind is Kind.GRADIENT:
                if Rule.SPILL_WAITS in self.rules:
                    now.ops.append(("barrier",))
                row = self.places.row(key)
                now.ops += [write({row: now.memory.objects[key]}), flush([row])]
                now.spilled.add(key)
            else:
                if key in now.awaited:
                    now.ops.append(("barrier",))
                    now.awaited.discard(key)
                if self.scenario.journal:
                    place = self.places.finished_place(key)
                    now.ops.append(write({place: now.memory.objects[key]}))

    def owned(self, k: int, norms: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        """Return the norms of a segment's own parameters."""
        owns = set(self.model.segment(k).owns)
        return tuple(row for row in norms if row[0] in owns)


def _other(tree: str) -> str:
    return "b" if tree == "a" else "a"


def write(contents: dict[Place, Any]) -> Op:
    return ("write", tuple(contents.items()), True)


def rename(contents: dict[Place, Any]) -> Op:
    return ("write", tuple(contents.items()), False)


def flush(
    places: Iterable[Place], rule: Rule | None = None, rules: frozenset[Rule] = frozenset()
) -> Op:
    return ("flush", tuple(places) if rule is None or rule in rules else ())
