"""What a process does first, on a disk as it finds it: `execute.resume` over a modelled disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.recovery import Action, Decision, Found, decide
from tests.protocol.contents import Ledger
from tests.protocol.disk import Disk, Image, Place
from tests.protocol.rules import Rule
from tests.protocol.scripts import METRICS, ROOT, STORE, Context, LostError, Script, Scripts

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
        if scenario.commit_every > 1:
            return self._start_tree(image)
        if read(ROOT) is None:
            written = frozenset(k for k in scenario.stored if self._is_written(image, k))
            return Start(self.scripts.creation(written), decide(Found(None)))
        records = {k: self._record(image, ("live", k)) for k in scenario.stored}
        kept = self._kept(image) if scenario.journal else {}
        versions = {k: record[2] for k, record in records.items()}
        newest = max(versions.values())
        lowest = min(k for k, version in versions.items() if version == newest)
        interrupted = not scenario.journal and any(v != newest for v in versions.values())
        handoff = dict(records[lowest][4]) if interrupted else {}
        verifies = all(read(self.scripts.row(key)) == content for key, content in handoff.items())
        segments = [segment.index for segment in self.scripts.model.segments]
        found = Found(
            versions=tuple(versions.get(k) for k in segments),
            gradients=tuple(kept[k][2] if k in kept else None for k in segments)
            if scenario.journal
            else None,
            handoffs=frozenset({(lowest, newest)} if verifies else ()),
        )
        decision = decide(found)
        state = self._state(image, records)
        if decision.action is Action.CONTINUE:
            return self._continued(image, decision, state, handoff, records)
        sums: dict[ObjectKey, int] = {}
        for k in decision.pending:
            self._adopt(image, kept[k], state, sums)
        done = decision.done
        source = kept if kept and all(row[2] == done for row in kept.values()) else records
        ledger = _ledger(source, done)
        losses, norms = ledger.frozen()
        context = Context(
            decision.step,
            tuple(state.items()),
            pending=decision.pending,
            sums=tuple(sums.items()),
            losses=losses if decision.pending else (),
            norms=norms if decision.pending else (),
            cut_metrics=self._metrics(image, done, ledger),
        )
        return Start(self.scripts.script(context), decision)

    def _continued(
        self,
        image: Image,
        decision: Decision,
        state: dict[ObjectKey, int],
        handoff: dict[ObjectKey, int],
        records: dict[int, Any],
    ) -> Start:
        first = min((key.micro_batch for key in handoff), default=0)
        sums: dict[ObjectKey, int] = {}
        if first:
            kept = self._kept(image)
            for k in self.scripts.scenario.stored:
                if k > decision.segment:
                    continue
                if k not in kept or kept[k][2] != decision.step or kept[k][3] != first:
                    raise LostError(f"the sums of segment {k} are missing")
                self._adopt(image, kept[k], state, sums)
        losses, norms = _ledger(records, decision.step).frozen()
        context = Context(
            decision.step,
            tuple(state.items()),
            top=decision.segment,
            from_micro_batch=first,
            sums=tuple(sums.items()),
            handoff=tuple(handoff.items()),
            losses=losses,
            norms=norms,
            cut_metrics=self._metrics(image, decision.done, Ledger()),
        )
        return Start(self.scripts.script(context), decision)

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
            commit_every=self.scripts.scenario.commit_every,
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
        if self.scripts.scenario.commit_every > 1:
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

    def _kept(self, image: Image) -> dict[int, Any]:
        rows = {}
        for k in self.scripts.scenario.stored:
            place: Place = ("kept", k, "record")
            if place not in self.disk.index:
                continue  # the highest one with state keeps none: its own commit comes first
            record = self.disk.read(image, place)
            if isinstance(record, tuple):
                rows[k] = record
        return rows

    def _adopt(
        self, image: Image, record: Any, state: dict[ObjectKey, int], sums: dict[ObjectKey, int]
    ) -> None:
        for key, content in record[4]:
            if self.disk.read(image, self.scripts.kept_place(key)) != content:
                raise LostError(f"what was kept of segment {key.segment} does not verify")
            (sums if key.kind is Kind.ACCUMULATOR else state)[key] = content

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
