"""What a process does first, on a disk as it finds it: `run.resume` over a modelled disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.program.forwards import recoverable
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.slots.recovery_rules import Action, Decision, Found, decide
from tests.protocol.contents import Ledger
from tests.protocol.disk import Disk, Image, Place
from tests.protocol.rules import Rule
from tests.protocol.run import METRICS, ROOT, STORE, Context, LostError, Script
from tests.protocol.scripts import Scripts

__all__ = ["Recovery", "Start"]


@dataclass(frozen=True)
class Start:
    """Where a process goes on."""

    script: Script
    decision: Decision


@dataclass(frozen=True)
class Recovery:
    """Recovers a scenario's runs."""

    scripts: Scripts
    disk: Disk
    rules: frozenset[Rule]

    def flush(self, image: Image) -> Image:
        """Do what comes before anything is read."""
        if Rule.FLUSH_FIRST in self.rules:
            image = self.disk.flush_devices(image, range(self.scripts.scenario.disks))
        # Chunks are read past the page cache, so always from the disk.
        direct = Rule.READ_FROM_DISK not in self.rules
        return self.disk.forget(
            image,
            [p for p in self.disk.places if not direct or p[0] == "gradients" or p[-1] == "chunks"],
        )

    def start(self, image: Image) -> Start:
        """Return where a process goes on that finds this image.

        Raises Undecided where it reads what a power loss left open, LostError where it cannot go
        on or believes what it must not.
        """
        try:
            return self._start(image)
        except DamagedStoreError as error:
            raise LostError(f"exit 3: {error}") from error

    def _start(self, image: Image) -> Start:
        scenario, read = self.scripts.scenario, self._reader(image)
        if scenario.is_whole:
            return self._start_tree(image)
        if read(ROOT) is None:
            written = frozenset(k for k in scenario.stored if self._is_written(image, k))
            return Start(self.scripts.creation(written), decide(Found(None)))
        records = {k: self._record(image, ("live", k)) for k in scenario.stored}
        finished = self._finished(image) if scenario.journal else None
        decision, handoff = self._decide(image, records, finished)
        state = self._state(image, records)
        sums: dict[ObjectKey, int] = {}
        awaited: set[ObjectKey] = set()
        if decision.action is Action.CONTINUE:
            above = {k: row for k, row in (finished or {}).items() if k > decision.segment}
            for record in above.values():
                awaited |= self._adopt(image, record, state, sums)
            ledger = _ledger(records if finished is None else above, decision.step)
            cut = self._metrics(image, decision.done, Ledger())
        else:
            for k in decision.pending:
                awaited |= self._adopt(image, (finished or {})[k], state, sums)
            of_step = finished and all(row[2] == decision.done for row in finished.values())
            ledger = _ledger(finished if finished and of_step else records, decision.done)
            cut = self._metrics(image, decision.done, ledger)
        going_on = decision.action is Action.CONTINUE or decision.pending
        losses, norms = ledger.frozen() if going_on else ((), ())
        context = Context(
            decision.step,
            tuple(state.items()),
            top=decision.segment if decision.action is Action.CONTINUE else None,
            pending=decision.pending,
            sums=tuple(sums.items()),
            awaited=frozenset(awaited),
            handoff=tuple(handoff.items()) if decision.action is Action.CONTINUE else (),
            losses=losses,
            norms=norms,
            cut_metrics=cut,
        )
        if scenario.values and decision.step <= scenario.steps:
            context = replace(context, present=self._values(image, context))
        return Start(self.scripts.script(context), decision)

    def _decide(
        self, image: Image, records: dict[int, Any], finished: dict[int, Any] | None
    ) -> tuple[Decision, dict[ObjectKey, int]]:
        """Decide by what verifies; return the hand-off of the step that was being committed."""
        newest = max(record[2] for record in records.values())
        step, commits = (newest, records) if finished is None else (newest + 1, finished)
        done = {k for k, record in commits.items() if record[2] == step}
        missing = max(records.keys() - done, default=0)
        lowest = min((k for k in done if k > missing), default=0)
        interrupted = missing > 0 and lowest > 0
        handoff = dict(commits[lowest][4]) if interrupted else {}
        verifies = all(
            self.disk.read(image, self.scripts.places.row(key)) == content
            for key, content in handoff.items()
        )
        segments = [segment.index for segment in self.scripts.model.segments]
        found = Found(
            versions=tuple(records[k][2] if k in records else None for k in segments),
            gradients=None
            if finished is None
            else tuple(finished[k][2] if k in finished else None for k in segments),
            handoffs=frozenset({(lowest, step)} if interrupted and verifies else ()),
        )
        return decide(found), handoff

    def _values(self, image: Image, context: Context) -> tuple[tuple[ObjectKey, int], ...]:
        """Return what an earlier process left of the step's forwards."""
        program = self.scripts.builder.step(pending_updates=context.pending, top=context.top)
        found = []
        for key in recoverable(program):
            content = self.disk.read(image, self.scripts.places.value_place(key))
            if isinstance(content, tuple) and content[1] == context.step:
                found.append((key, content[2]))
            elif Rule.VALUES_CHECKED not in self.rules:
                found.append((key, -1))
        return tuple(found)

    def _start_tree(self, image: Image) -> Start:
        read = self._reader(image)
        tree = read(STORE)
        if tree is None:
            written = frozenset(
                k for k in self.scripts.scenario.stored if self._is_written(image, k)
            )
            return Start(self.scripts.creation(written), decide(Found(None)))
        root = read(("tree", tree, "root"))
        if not isinstance(root, tuple):
            raise LostError("the root does not verify")
        records = {
            k: self._record_at(image, ("tree", tree, k), k) for k in self.scripts.scenario.stored
        }
        segments = [segment.index for segment in self.scripts.model.segments]
        found = Found(
            versions=tuple(records[k][2] if k in records else None for k in segments),
            is_whole=self.scripts.scenario.is_whole,
            root_step=root[1],
        )
        decision = decide(found)
        done = decision.done
        context = Context(
            decision.step,
            tuple(self._state(image, records).items()),
            tree=str(tree),
            cut_metrics=self._metrics(image, done, _ledger(records, done)),
        )
        return Start(self.scripts.script(context), decision)

    def _reader(self, image: Image) -> Any:
        return lambda place: self.disk.read(image, place)

    def _is_written(self, image: Image, k: int) -> bool:
        if self.scripts.scenario.is_whole:
            place: Place = ("tree", "a", k, "record")
        else:
            slot = self.disk.read(image, ("live", k))
            if slot is None:
                return False
            place = ("slot", slot, "record")
        record = self.disk.read(image, place)
        return isinstance(record, tuple) and record[2] == 0

    def _record(self, image: Image, link: Place) -> Any:
        slot = self.disk.read(image, link)
        return self._record_at(image, ("slot", slot), link[1])

    def _record_at(self, image: Image, place: Place, k: object) -> Any:
        """Return a live record, whose chunks have to verify."""
        record = self.disk.read(image, (*place, "record"))
        if not isinstance(record, tuple) or record[1] != k:
            raise LostError(f"the live record of segment {k} does not verify")
        if self.disk.read(image, (*place, "chunks")) != record[3]:
            raise LostError(f"the live chunks of segment {k} do not verify")
        return record

    def _state(self, image: Image, records: dict[int, Any]) -> dict[ObjectKey, int]:
        """Return the contents of the live arrays, which a token of their chunks stands for."""
        return {
            key: content
            for k, record in records.items()
            for key, content in self.scripts.arrays(k, record[3])
        }

    def _finished(self, image: Image) -> dict[int, Any]:
        rows = {}
        for k in self.scripts.scenario.stored:
            record = self.disk.read(image, ("finished", k, "record"))
            if isinstance(record, tuple):
                rows[k] = record
        return rows

    def _adopt(
        self,
        image: Image,
        record: Any,
        state: dict[ObjectKey, int],
        sums: dict[ObjectKey, int],
    ) -> set[ObjectKey]:
        """Take over the finished gradient of a segment, and its buffers; return the gradient."""
        for key, content in record[3]:
            if self.disk.read(image, self.scripts.places.finished_place(key)) != content:
                raise LostError(f"the finished gradient of segment {key.segment} does not verify")
            (sums if key.kind is Kind.ACCUMULATOR else state)[key] = content
        return {key for key, _ in record[3] if key.kind is Kind.ACCUMULATOR}

    def _metrics(self, image: Image, done: int, ledger: Ledger) -> int | None:
        """Return how many lines there have to be; None where there are as many."""
        lines = self.disk.read(image, METRICS)
        assert isinstance(lines, int)
        if lines == done:
            return None
        if lines < done - 1:
            raise LostError(f"the line of step {lines + 1} is lost")
        if lines < done and ledger.frozen() != self.scripts.reference[f"ledger {done}", 0]:
            raise LostError(f"the line of step {done} is lost, and the records lack its numbers")
        return done


def _ledger(records: dict[int, Any], step: int) -> Ledger:
    ledger = Ledger()
    for record in records.values():
        if record[2] == step:
            ledger.losses.update(record[5])
            ledger.norms.update(record[6])
    return ledger
