"""The disk operations of a step, as the main thread and the committer's make them.

The instructions are those of `StepBuilder`; this says what each of them puts on the disk, after
`execute.commits`, `execute.home`, `execute.trees` and `store.commit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.rows import row_turn
from swaptrain.program.step import StepBuilder
from tests.protocol.contents import Contents, Ledger, Memory
from tests.protocol.disk import Place
from tests.protocol.rules import Rule

__all__ = ["Context", "LostError", "Scenario", "Script", "Scripts"]

Op = tuple[Any, ...]
"""`write` places contents tears, `flush` places, `take` k, `rename` k, `give` k, `submit` ops,
`barrier`, `done` k. Places of the slot that a commit of segment k writes are `new` k part."""

METRICS: Place = ("metrics",)
ROOT: Place = ("root",)
STORE: Place = ("store",)


class LostError(Exception):
    """A state from which the run cannot go on to the same bits."""


@dataclass(frozen=True)
class Scenario:
    """A small run."""

    name: str
    builder: StepBuilder
    steps: int = 2
    commit_every: int = 1
    spares: int = 1
    """Slots that each shape class has beyond its segments."""
    alike: bool = True
    """Whether all segments are of one shape class."""
    disks: int = 1
    """Slots lie on them in turn; all else on the first."""
    spills: bool = False
    """Whether the pool is so small that every gradient and sum leaves memory at once."""

    def __str__(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")

    @property
    def stored(self) -> list[int]:
        """The segments that have state."""
        return [s.index for s in self.builder.model.segments if self.builder.state_arrays[s.index]]

    @property
    def journal(self) -> bool:
        """Whether finished gradients are kept beside the slots."""
        return self.builder.deferred and self.commit_every == 1

    @property
    def waves(self) -> bool:
        return self.builder.wave < self.builder.micro_batches and not self.builder.deferred

    def shape_class(self, k: int) -> str:
        return "a" if self.alike else f"c{k}"

    def slots(self) -> dict[str, list[str]]:
        """Return the slots' names by shape class."""
        members: dict[str, list[int]] = {}
        for k in self.stored:
            members.setdefault(self.shape_class(k), []).append(k)
        return {
            name: [f"{name}-{n}" for n in range(len(ks) + self.spares)]
            for name, ks in members.items()
        }


@dataclass(frozen=True)
class Context:
    """All that the rest of a run depends on, at the start of a step."""

    step: int
    state: tuple[tuple[ObjectKey, int], ...]
    tree: str = "a"
    top: int | None = None
    from_micro_batch: int = 0
    pending: tuple[int, ...] = ()
    sums: tuple[tuple[ObjectKey, int], ...] = ()
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
    name: str


@dataclass
class _Step:
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


class Scripts:
    """Makes the scripts of a scenario under a set of rules."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        self.scenario, self.rules = scenario, rules
        self.builder, self.model = scenario.builder, scenario.builder.model
        self.contents = Contents()
        self.reference: dict[tuple[str, int], object] = {}
        """What an uninterrupted run holds: the state of a segment, the ledger of a step."""
        self._made: dict[Context, Script] = {}
        self._learning = True
        self._learn()

    def _learn(self) -> None:
        context: Context | None = self.first()
        for k in self.scenario.stored:
            self.reference[f"state {k}", 0] = self.state_token(k, dict(self.first().state))
        while context is not None:
            context = self.script(context).then
        self._learning = False
        self._made.clear()

    def first(self) -> Context:
        """Return where a run begins whose store has just been created."""
        state = [
            (key, self.contents.of("initial", key.name, k))
            for k in self._segments()
            for key in self._state_keys(k)
        ]
        return Context(1, tuple(state))

    def _segments(self) -> list[int]:
        return [segment.index for segment in self.model.segments]

    def _state_keys(self, k: int) -> list[ObjectKey]:
        return [ObjectKey(Kind.STATE, name, k) for name in self.builder.state_arrays[k]]

    def _frozen(self) -> dict[ObjectKey, int]:
        step = self.builder.step()
        keys = {key for i in step for key in i.needs if key.kind is Kind.STATE}
        return {
            key: self.contents.of("frozen", key)
            for key in sorted(keys)
            if key.name not in self.builder.state_arrays[key.segment]
        }

    def state_token(self, k: int, objects: dict[ObjectKey, int]) -> int:
        """Return the content of a segment's chunks, and so its checksums."""
        return self.contents.of("chunks", k, *(objects[key] for key in self._state_keys(k)))

    def arrays(self, k: int, token: int) -> list[tuple[ObjectKey, int]]:
        """Return the contents of a segment's arrays, which a token stands for."""
        term = self.contents.term(token)
        return list(zip(self._state_keys(k), term[2:], strict=True))

    def script(self, context: Context) -> Script:
        """Return what the process does until the step is at its end."""
        if context not in self._made:
            self._made[context] = self._make(context)
        return self._made[context]

    def creation(self, written: frozenset[int]) -> Script:
        """Return the creation of the store, but for the segments that are written."""
        ops: list[Op] = []
        objects = dict(self.first().state)
        for k in self.scenario.stored:
            if k in written:
                continue
            token = self.state_token(k, objects)
            record = ("record", k, 0, token, (), (), ())
            if self.scenario.commit_every > 1:
                chunks, place = ("tree", "a", k, "chunks"), ("tree", "a", k, "record")
                ops += [_write({chunks: token}), _flush([chunks])]
                ops += [_write({place: record}), _flush([place])]
                continue
            ops.append(("take", k))
            ops += [_write({("new", k, "chunks"): token}), _flush([("new", k, "chunks")])]
            ops += [_write({("new", k, "record"): record}), _flush([("new", k, "record")])]
            ops += [("rename", k), _flush([("live", k)]), ("give", k)]
        if self.scenario.commit_every > 1:
            place = ("tree", "a", "root")
            ops += [_rename({place: ("root", 0)}), _flush([place])]
            ops += [_rename({STORE: "a"}), _flush([STORE])]
        else:
            ops += [_rename({ROOT: ("root", 0)}), _flush([ROOT])]
        return Script(tuple(ops), self.first(), "creation")

    def _make(self, context: Context) -> Script:
        scenario = self.scenario
        now = _Step(
            Memory(
                self.model,
                self.contents,
                {**self._frozen(), **dict(context.state), **dict(context.sums)},
                Ledger(),
                context.ledger(),
            ),
            context.step,
            tree=context.tree,
        )
        if context.cut_metrics is not None:
            now.ops += [_rename({METRICS: context.cut_metrics}), _flush([METRICS])]
        if context.top is not None:
            now.memory.ledger = context.ledger()
            now.memory.objects.update(context.handoff)
            now.live.update(dict.fromkeys(dict(context.handoff)))
            now.submitted.update(dict(context.handoff))
        if scenario.journal and Rule.GRADIENT_AWAITED in self.rules:
            now.awaited.update(dict(context.sums))
        if context.step > scenario.steps and context.top is None:
            self._run(now, self.builder.flush(context.pending), deferred=True)
            now.ops.append(("barrier",))
            return Script(tuple(now.ops), None, "end")
        program = self.builder.step(
            pending_updates=context.pending,
            top=context.top,
            from_micro_batch=context.from_micro_batch,
        )
        now.rewrite = self._ends_tree(context.step) and not self.builder.deferred
        self._run(now, program, deferred=self.builder.deferred)
        self._expect(f"ledger {context.step}", 0, now.memory.ledger.frozen())
        pending = tuple(scenario.stored) if self.builder.deferred else ()
        tree = context.tree
        if self._ends_tree(context.step):
            if pending:
                now.memory.pending, now.version = now.memory.ledger, context.step + 1
                now.rewrite = True
                self._run(now, self.builder.flush(pending), deferred=True)
                pending = ()
            tree = self._switch_tree(now, context)
        line = [_rename({METRICS: context.step})]
        now.ops.append(("submit", (*line, _flush([METRICS], Rule.METRICS_FLUSHED, self.rules))))
        state = tuple((key, now.memory.objects[key]) for key, _ in context.state)
        losses, norms = now.memory.ledger.frozen()
        then = Context(
            context.step + 1,
            state,
            tree=tree,
            pending=pending,
            sums=tuple(
                (key, now.memory.objects[key])
                for key in (ObjectKey(Kind.ACCUMULATOR, "gradient", k) for k in pending)
                if key in now.memory.objects
            ),
            losses=losses if pending else (),
            norms=norms if pending else (),
        )
        return Script(tuple(now.ops), then, f"step {context.step}")

    def _ends_tree(self, step: int) -> bool:
        every = self.scenario.commit_every
        return every > 1 and (step % every == 0 or step == self.scenario.steps)

    def _run(self, now: _Step, program: Program, *, deferred: bool) -> None:
        """Execute a program; a deferred update is of the step before."""
        for instruction in program:
            update_step = now.version - 1 if deferred else now.version
            now.memory.run(instruction, now.version, update_step, clipped=deferred)
            if instruction.operation in (Operation.TURN, Operation.BACKWARD):
                now.ops.append(("done", instruction.segment))
            now.live.update(
                dict.fromkeys(key for key in instruction.writes if key.kind is Kind.GRADIENT)
            )
            for key in instruction.frees:
                now.live.pop(key, None)
                now.submitted.discard(key)
            if instruction.operation is Operation.UPDATE:
                self._update(now, instruction, update_step, deferred=deferred)
            elif self.scenario.commit_every == 1 and instruction.operation in (
                Operation.SETTLE,
                Operation.KEEP,
            ):
                self._keep(now, instruction)
            for key in instruction.frees:
                now.spilled.discard(key)
                now.memory.objects.pop(key, None)
            if self.scenario.spills and self.scenario.commit_every == 1:
                self._spill(now, instruction)

    def _update(
        self, now: _Step, instruction: Instruction, version: int, *, deferred: bool
    ) -> None:
        k = instruction.segment
        token = self.state_token(k, now.memory.objects)
        ledger = now.memory.pending if deferred else now.memory.ledger
        owned = set(self.model.segment(k).owns)
        losses, norms = ledger.frozen()
        norms = tuple(row for row in norms if row[0] in owned)
        self._expect(f"state {k}", version, token)
        if self.scenario.commit_every > 1:
            self._write_tree(now, k, version, token, (losses, norms))
            return
        live = [(key, now.memory.objects[key]) for key in now.live]
        in_memory = {
            self.row(key): content
            for key, content in live
            if key not in now.submitted and key not in now.spilled
        }
        record = ("record", k, version, token, tuple(live), losses, norms)
        chunks, place = ("new", k, "chunks"), ("new", k, "record")
        now.ops += [("take", k), _write({chunks: token})]
        job: list[Op] = []
        if in_memory and Rule.HANDOFF in self.rules:
            target = job if Rule.HANDOFF_WAITS in self.rules else now.ops
            target.append(_write(in_memory))
            job.append(_flush(in_memory, Rule.HANDOFF_FLUSHED, self.rules))
        job.append(_flush([chunks], Rule.CHUNKS_FLUSHED, self.rules))
        job += [_write({place: record}), _flush([place], Rule.RECORD_FLUSHED, self.rules)]
        job.append(("rename", k))
        if Rule.SWITCH_FLUSHED not in self.rules:
            job.append(("give", k))
        job.append(_flush([("live", j) for j in self.scenario.stored]))
        job += [("give", k)]
        now.ops.append(("submit", tuple(job)))
        now.submitted.update(key for key, _ in live)

    def _write_tree(
        self, now: _Step, k: int, version: int, token: int, ledger: tuple[Any, Any]
    ) -> None:
        tree = _other(now.tree)
        chunks, place = ("tree", tree, k, "chunks"), ("tree", tree, k, "record")
        if now.rewrite:
            job = (
                _write({chunks: token}),
                _flush([chunks], Rule.TREE_FLUSHED, self.rules),
                _write({place: ("record", k, version, token, (), *ledger)}),
                _flush([place], Rule.TREE_FLUSHED, self.rules),
            )
            now.ops.append(("submit", job))
        elif self.scenario.spills:
            now.ops.append(_write({chunks: token}))

    def _switch_tree(self, now: _Step, context: Context) -> str:
        tree = _other(context.tree)
        root: Place = ("tree", tree, "root")
        now.ops += [
            ("barrier",),
            _rename({root: ("root", context.step)}),
            _flush([root], Rule.ROOT_FLUSHED, self.rules),
            _rename({STORE: tree}),
            _flush([STORE]),
        ]
        return tree

    def _keep(self, now: _Step, instruction: Instruction) -> None:
        if instruction.operation is Operation.KEEP and Rule.SUMS_KEPT not in self.rules:
            return
        k, m = instruction.segment, instruction.micro_batch
        finished = instruction.operation is Operation.SETTLE
        sums = {}
        places: dict[Place, object] = {}
        for key in instruction.reads:
            if key.kind is Kind.STATE and Rule.BUFFERS_KEPT not in self.rules:
                continue
            sums[key] = now.memory.objects[key]
            places[self.kept_place(key)] = sums[key]
        count = self.builder.micro_batches if finished else m + 1
        losses, norms = now.memory.ledger.frozen()
        owned = set(self.model.segment(k).owns)
        norms = tuple(row for row in norms if row[0] in owned)
        record = ("kept", k, now.version, count, tuple(sums.items()), losses, norms)
        place: Place = ("kept", k, "record")
        job = (
            _write(places),
            _flush(places, Rule.SUMS_FLUSHED, self.rules),
            _write({place: record}),
            _flush([place], Rule.SUMS_FLUSHED, self.rules),
        )
        now.ops.append(("submit", job))
        if finished and Rule.GRADIENT_AWAITED in self.rules:
            now.awaited.update(key for key in sums if key.kind is Kind.ACCUMULATOR)

    def _spill(self, now: _Step, instruction: Instruction) -> None:
        """Write what the instruction made and no commit has taken, as a full pool does."""
        # Sums first: nothing says which of them a full pool drives out first.
        for key in sorted((*instruction.writes, *instruction.changes)):
            if key in instruction.frees or key.kind not in (Kind.GRADIENT, Kind.ACCUMULATOR):
                continue
            if key.kind is Kind.GRADIENT:
                if Rule.SPILL_WAITS in self.rules:
                    now.ops.append(("barrier",))
                row = self.row(key)
                now.ops += [_write({row: now.memory.objects[key]}), _flush([row])]
                now.spilled.add(key)
            else:
                if key in now.awaited:
                    now.ops.append(("barrier",))
                    now.awaited.discard(key)
                if self.scenario.journal:
                    now.ops.append(_write({self.kept_place(key): now.memory.objects[key]}))

    def row(self, key: ObjectKey) -> Place:
        """Return the row of a gradient's file."""
        turn = row_turn(self.model, key) if Rule.HANDOFF_IN_TURN in self.rules else 0
        return ("gradients", key.name, turn, key.micro_batch)

    def spill_places(self) -> list[Place]:
        """Return the places of gradients and of what is kept."""
        if self.scenario.commit_every > 1:
            return []
        places: dict[Place, None] = {}
        for instruction in self.builder.step():
            for key in instruction.writes:
                if key.kind is Kind.GRADIENT:
                    places[self.row(key)] = None
            if instruction.operation in (Operation.KEEP, Operation.SETTLE):
                places["kept", instruction.segment, "record"] = None
                places.update(dict.fromkeys(self.kept_place(key) for key in instruction.reads))
        return list(places)

    def kept_place(self, key: ObjectKey) -> Place:
        """Return where a gradient or buffers are kept beside their slot."""
        return ("kept", key.segment, key.name)

    def _expect(self, what: str, version: int, content: object) -> None:
        """Compare with the uninterrupted run."""
        if self._learning:
            self.reference[what, version] = content
        elif self.reference.get((what, version)) != content:
            raise LostError(f"{what}, version {version}, has other bits")


def _other(tree: str) -> str:
    return "b" if tree == "a" else "a"


def _write(contents: dict[Place, Any]) -> Op:
    return ("write", tuple(contents.items()), True)


def _rename(contents: dict[Place, Any]) -> Op:
    return ("write", tuple(contents.items()), False)


def _flush(
    places: Iterable[Place], rule: Rule | None = None, rules: frozenset[Rule] = frozenset()
) -> Op:
    return ("flush", tuple(places) if rule is None or rule in rules else ())
