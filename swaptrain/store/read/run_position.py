"""Where a run stands, by its records alone: the one answer for every verb.

A start decides by it where to go on, and reads the bytes of the hand-off afterwards. `inspect` and
`verify` show it, `export` asks it for a whole step, and a finished run is known by it. The rules
are the tables of the commit protocol (`store/slots/recovery_rules.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.format.going_back import GoingBackRecord
from swaptrain.store.format.root import RootRecord
from swaptrain.store.format.state_record import HandoffRow, SegmentRecord, read_finished
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.stored_segments import stored_segment
from swaptrain.store.slots.recovery_rules import Action, Decision, Found, decide, last_commit
from swaptrain.units import how_many

__all__ = ["Handoff", "Phase", "RunPosition", "position_text", "read_position"]


class Phase(StrEnum):
    """Part of a step that an interruption leaves half done; a forward leaves no record."""

    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Handoff:
    """Gradients that the commit of a segment handed on to the segments below it."""

    segment: int
    rows: tuple[HandoffRow, ...]


@dataclass(frozen=True)
class RunPosition:
    """A run between two steps, or inside one. Two of the same records are equal."""

    found: Found
    """Versions of the live slots and of the finished gradients."""
    decision: Decision | None
    """What a start does first; None where the records fit no interruption."""
    live: Mapping[int, SegmentRecord] = field(default_factory=dict)
    """Records of the live slots by segment: of those that have state."""
    gradients: Mapping[int, SegmentRecord] = field(default_factory=dict)
    """Records of finished gradients that wait for an update, or waited for one; torn ones left
    out."""
    handoff: Handoff | None = None
    """Gradients that the step in progress goes on from."""
    going_back: bool = False
    """Whether the run is going back to the snapshot of step `done`: its live names are those of two
    steps until the next start."""
    damages: tuple[DamagedStoreError, ...] = field(default=(), compare=False)
    """Reasons why nothing is decided."""
    torn: tuple[DamagedStoreError, ...] = field(default=(), compare=False)
    """Records of gradients that do not verify: no damage as long as the run can go on."""

    def decided(self) -> Decision:
        """Return what a start does first; raises DamagedStoreError where the run cannot go on."""
        if self.decision is None:
            raise self.damages[0]
        return self.decision

    @property
    def done(self) -> int:
        """Last step that is done: the last one with a line in metrics.jsonl.

        With deferred updates its weights may still wait for their update. Like all that follows it
        raises DamagedStoreError where nothing is decided.
        """
        return self.decided().done

    @property
    def phase(self) -> Phase | None:
        """Part of the step in progress; None between two steps."""
        decision = self.decided()
        if decision.action is Action.CONTINUE:
            return Phase.BACKWARD
        return Phase.UPDATE if decision.pending else None

    @property
    def step(self) -> int | None:
        """Step whose backward or update is half done; None between two steps."""
        if self.phase is Phase.UPDATE:
            return self.done
        return None if self.phase is None else self.decided().step

    @property
    def segment(self) -> int | None:
        """Next segment of the backward or of the update; None between two steps."""
        return self.decided().segment or min(self.pending, default=None)

    @property
    def pending(self) -> tuple[int, ...]:
        """Segments that wait for the update of step `done`."""
        return self.decided().pending

    @property
    def is_whole(self) -> bool:
        """Whether all live slots hold the state after step `done`."""
        return not self.going_back and set(self.found.versions or ()) - {None} == {self.done}

    @property
    def gradients_used(self) -> tuple[int, ...]:
        """Segments whose finished gradient a start uses: above the hand-off, or pending."""
        if self.phase is Phase.BACKWARD:
            return tuple(k for k in self.gradients if k > (self.segment or 0))
        return self.pending

    def without_handoff(self, damage: DamagedStoreError) -> RunPosition:
        """Return the position where the bytes of the hand-off are damaged.

        A deferred step begins anew, a fused one cannot go on.
        """
        torn = replace(self, torn=(*self.torn, damage), handoff=None)
        return _decided(torn, replace(self.found, handoffs=frozenset()))


def position_text(position: RunPosition) -> str:
    """Return where a run is, in words that follow "is"."""
    if position.decision is None:
        return "at no step: its records do not fit together"
    if position.phase is Phase.BACKWARD:
        return f"inside step {position.step}, after segment {position.decision.segment + 1}"
    if position.pending:
        pending = how_many(len(position.pending), "segment")
        return f"at step {position.done}, its update pending in {pending}"
    return f"at step {position.done}"


def read_position(
    paths: RunPaths, root: RootRecord, live: Mapping[int, SegmentRecord] | None = None
) -> RunPosition:
    """Return where a run stands.

    `live` has the records of the live slots, for a caller that has read them. What is wrong is in
    the result's `damages`; raises RunError where the disk fails.
    """
    if paths.going_back.exists():
        return _going_back(paths)
    if live is None:
        live, unread = _live_records(paths, root)
        if unread:
            return RunPosition(Found(None), None, live, damages=tuple(unread))
    deferred = root.choices.deferred
    gradients, torn = dict[int, SegmentRecord](), list[DamagedStoreError]()
    if deferred and not root.is_whole:
        gradients, torn = _finished_gradients(paths, root, live)
    versions = _versions(live)
    finished = _versions(gradients) if deferred and not root.is_whole else None
    last = last_commit(versions, finished) if not root.is_whole else None
    indices = [row.segment for row in root.segments]
    found = Found(
        versions=tuple(versions.get(k) for k in indices),
        gradients=None if finished is None else tuple(finished.get(k) for k in indices),
        # As if the hand-off were whole: its bytes are for a start to read.
        handoffs=frozenset(() if last is None else {last}),
        is_whole=root.is_whole,
        root_step=root.step,
    )
    position = RunPosition(found, None, live, gradients, torn=tuple(torn))
    position = _decided(position, found)
    if last is None or position.decision is None or position.phase is not Phase.BACKWARD:
        return position
    commit = (live if finished is None else gradients)[last[0]]
    return replace(position, handoff=Handoff(last[0], commit.handoff.gradients))


def _decided(position: RunPosition, found: Found) -> RunPosition:
    try:
        return replace(position, found=found, decision=decide(found))
    except DamagedStoreError as error:
        # A file that keeps the rest from being understood is named instead.
        damages = position.torn or (error,)
        return replace(position, found=found, decision=None, damages=damages)


def _going_back(paths: RunPaths) -> RunPosition:
    """Return the position that the next start makes: the snapshot's."""
    nothing = Found(None)
    try:
        intent = GoingBackRecord.read(paths.going_back)
    except DamagedStoreError as error:
        return RunPosition(nothing, None, going_back=True, damages=(error,))
    return RunPosition(nothing, Decision(Action.BEGIN, intent.step + 1), going_back=True)


def _live_records(
    paths: RunPaths, root: RootRecord
) -> tuple[dict[int, SegmentRecord], list[DamagedStoreError]]:
    """Return the records of the live slots, and what is wrong with others."""
    records, damages = dict[int, SegmentRecord](), list[DamagedStoreError]()
    for row in root.segments:
        k = row.segment
        stored = stored_segment(paths.run_dir, k)
        if stored.state is None:
            if row.state:
                text = "a segment's live name is missing"
                damages.append(DamagedStoreError(text, segment=k, path=stored.link))
            continue
        try:
            record = stored.state.read_unfitted(k, link=stored.link)
        except DamagedStoreError as error:
            damages.append(error.within(Where(segment=k)))
            continue
        if record.fingerprint != root.fingerprint:
            text = "a slot belongs to another model"
            damages.append(DamagedStoreError(text, segment=k, path=stored.state.record_path))
        records[k] = record
    return records, damages


def _finished_gradients(
    paths: RunPaths, root: RootRecord, segments: Mapping[int, SegmentRecord]
) -> tuple[dict[int, SegmentRecord], list[DamagedStoreError]]:
    """Return the records of this model's finished gradients, and what is torn."""
    records, torn = dict[int, SegmentRecord](), list[DamagedStoreError]()
    for k in segments:
        try:
            record = read_finished(paths.gradient_record(k), k)
        except DamagedStoreError as error:
            torn.append(error.within(Where(segment=k)))
            continue
        if record.fingerprint == root.fingerprint:
            records[k] = record
    return records, torn


def _versions(records: Mapping[int, SegmentRecord]) -> dict[int, int]:
    return {k: record.version for k, record in records.items()}
