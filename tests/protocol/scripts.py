"""What a process does from the start of a step to its end: the instructions of `StepBuilder`, and
the disk operations of the main thread and of the committer's that they lead to."""

from __future__ import annotations

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from tests.protocol.contents import Contents, Ledger, Memory
from tests.protocol.counting import waiting
from tests.protocol.operations import DiskOps, Step, flush, rename, write
from tests.protocol.rules import Rule
from tests.protocol.run import METRICS, ROOT, STORE, Context, LostError, Op, Scenario, Script

__all__ = ["Scripts"]


class Scripts:
    """Makes the scripts of a scenario under a set of rules."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        self.scenario, self.rules = scenario, rules
        self.builder, self.model = scenario.builder, scenario.builder.model
        self.contents = Contents()
        self.disk = DiskOps(scenario, rules)
        self.places = self.disk.places
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
            if self.scenario.is_whole:
                chunks, place = ("tree", "a", k, "chunks"), ("tree", "a", k, "record")
                ops += [write({chunks: token}), flush([chunks])]
                ops += [write({place: record}), flush([place])]
                continue
            ops.append(("take", k))
            ops += [write({("new", k, "chunks"): token}), flush([("new", k, "chunks")])]
            ops += [write({("new", k, "record"): record}), flush([("new", k, "record")])]
            ops += [("rename", k), flush([("live", k)]), ("give", k)]
        if self.scenario.is_whole:
            place = ("tree", "a", "root")
            ops += [rename({place: ("root", 0)}), flush([place])]
            ops += [rename({STORE: "a"}), flush([STORE])]
        else:
            ops += [rename({ROOT: ("root", 0)}), flush([ROOT])]
        return Script(tuple(ops), self.first())

    def _make(self, context: Context) -> Script:
        scenario = self.scenario
        now = Step(
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
            now.ops += [rename({METRICS: context.cut_metrics}), flush([METRICS])]
        if context.top is not None:
            now.memory.ledger = context.ledger()
            now.memory.objects.update(context.handoff)
            now.live.update(dict.fromkeys(dict(context.handoff)))
            now.submitted.update(dict(context.handoff))
        if Rule.GRADIENT_AWAITED in self.rules:
            now.awaited.update(context.awaited)
        if context.step > scenario.steps and context.top is None:
            self._run(now, self.builder.flush(context.pending), deferred=True)
            now.ops.append(("barrier",))
            return Script(tuple(now.ops), None, context.step)
        program = self.builder.step(
            pending_updates=context.pending,
            top=context.top,
            present=[key for key, _ in context.present],
        )
        self._adopt_values(now, program, context)
        now.rewrite = self._ends_tree(context.step) and not self.builder.deferred
        self._run(now, program, deferred=self.builder.deferred)
        self._expect(f"ledger {context.step}", 0, now.memory.ledger.frozen())
        pending = tuple(scenario.stored) if self.builder.deferred else ()
        tree = context.tree
        if pending and (scenario.flushes or self._ends_tree(context.step)):
            now.memory.pending, now.version = now.memory.ledger, context.step + 1
            now.rewrite = self._ends_tree(context.step)
            self._run(now, self.builder.flush(pending), deferred=True)
            pending = ()
        if self._ends_tree(context.step):
            tree = self.disk.switch_tree(now, context.step)
        line = [rename({METRICS: context.step})]
        now.ops.append(("submit", (*line, flush([METRICS], Rule.METRICS_FLUSHED, self.rules))))
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
            awaited=frozenset(now.awaited),
            losses=losses if pending else (),
            norms=norms if pending else (),
        )
        forwards = frozenset(i.segment for i in program if i.operation is Operation.FORWARD)
        return Script(tuple(now.ops), then, context.step, forwards)

    def _ends_tree(self, step: int) -> bool:
        every = self.scenario.commit_every
        return self.scenario.is_whole and (step % every == 0 or step == self.scenario.steps)

    def _run(self, now: Step, program: Program, *, deferred: bool) -> None:
        """Execute a program; a deferred update is of the step before."""
        barriers = waiting(program, lag=self.scenario.lag)
        for position, instruction in enumerate(program):
            update_step = now.version - 1 if deferred else now.version
            now.memory.run(instruction, now.version, update_step, clipped=deferred)
            self.disk.count(now, instruction, barrier=position in barriers)
            self.disk.observe(now, instruction)
            if instruction.operation is Operation.UPDATE:
                self._update(now, instruction, update_step, deferred=deferred)
            elif instruction.operation is Operation.NORMS and not self.scenario.is_whole:
                self.disk.finish_gradient(now, instruction)
            elif instruction.operation is Operation.FORWARD and self.scenario.values:
                self.disk.save(now, instruction)
            for key in instruction.frees:
                now.spilled.discard(key)
                now.memory.objects.pop(key, None)
            if self.scenario.spills and not self.scenario.is_whole:
                self.disk.spill(now, instruction)

    def _update(self, now: Step, instruction: Instruction, version: int, *, deferred: bool) -> None:
        k = instruction.segment
        token = self.state_token(k, now.memory.objects)
        losses, norms = (now.memory.pending if deferred else now.memory.ledger).frozen()
        ledger = (losses, self.disk.owned(k, norms))
        self._expect(f"state {k}", version, token)
        if self.scenario.is_whole:
            self.disk.write_tree(now, k, version, token, ledger)
        else:
            self.disk.commit(now, k, version, token, ledger)

    def _adopt_values(self, now: Step, program: Program, context: Context) -> None:
        """Let the program read what was found of the forwards that it leaves out."""
        read = {key for instruction in program for key in instruction.reads}
        made = {key for instruction in program for key in instruction.writes}
        forwarded = {i.segment for i in program if i.operation is Operation.FORWARD}
        for key, content in context.present:
            if key.kind is Kind.STATE:
                useful = key.segment not in forwarded
            else:
                useful = key in read and key not in made
            if useful:
                now.memory.objects[key] = content

    def _expect(self, what: str, version: int, content: object) -> None:
        """Compare with the uninterrupted run."""
        if self._learning:
            self.reference[what, version] = content
        elif self.reference.get((what, version)) != content:
            raise LostError(f"{what}, version {version}, has other bits")
