"""Replays a recording: at every moment, what the disk may show after a power failure is opened."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.support.recording import Event
from tests.support.recording_check import Found, Known, Promises, judge, look
from tests.support.recording_disk import Disk, State
from tests.support.recording_runs import End, Job
from tests.support.recording_states import Shelf, choices

__all__ = ["Bench", "Crash", "Kill", "Report"]

_SHOWN = 12


@dataclass(frozen=True)
class Crash:
    """A moment and what the disk shows then."""

    moment: int
    state: State
    position: str
    promised: Promises


@dataclass(frozen=True)
class Kill:
    """A moment at which the process dies and the power stays on: nothing is lost yet."""

    moment: int
    disk: Disk
    promised: Promises


@dataclass
class Report:
    """What was tried and what went wrong."""

    operations: int = 0
    moments: int = 0
    states: int = 0
    distinct: int = 0
    resumed: int = 0
    recoveries: int = 0
    """Recordings of a recovery that were replayed in their turn."""
    positions: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    violation_count: int = 0

    def wrong(self, text: str) -> None:
        """Count a violation; the first few are kept in words."""
        self.violation_count += 1
        if len(self.violations) < _SHOWN and text not in self.violations:
            self.violations.append(text)

    def add(self, other: Report) -> None:
        """Take in the counts of another replay."""
        for name in ("operations", "moments", "states", "distinct", "resumed", "recoveries"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.positions += other.positions
        self.violation_count += other.violation_count
        self.violations += other.violations[: _SHOWN - len(self.violations)]


class Bench:
    """One job's disks, what its uninterrupted run ends with, and the replay of its recordings."""

    def __init__(self, job: Job, known: Known, end: End, *, seed: int = 0) -> None:
        self.job, self._known, self._end = job, known, end
        self._rng = random.Random(seed)
        builder = job.prepared.plan.builder
        self._deferred = builder.deferred and not job.config.store.commit.is_whole
        self._looked: dict[int, Found] = {}

    def promises(self) -> Promises:
        """Return no promises."""
        return Promises(trees=self.job.config.store.commit.is_whole)

    def replay(
        self,
        disk: Disk,
        events: Sequence[Event],
        promised: Promises,
        *,
        width: int,
        stride: int = 1,
        keep: int = 0,
        kills: int = 0,
    ) -> tuple[Report, list[Crash], list[Kill]]:
        """Crash at every moment (every `stride`-th); return the counts and some of the crashes.

        `disk` and `promised` are where the events begin; they are changed. At most `keep` crashes
        for each position that is found are returned, a random choice, and so many kills.
        """
        killed: list[Kill] = []
        kill_at = set(self._rng.sample(range(len(events)), min(kills, len(events))))
        report = Report()
        shelf = Shelf(self.job.disks, disk.blobs)
        crashes: dict[str, list[Crash]] = {}
        seen: Counter[str] = Counter()
        before = -1
        for moment, event in enumerate(events):
            disk.apply(event)
            changed = event.kind not in ("mark", "begin", "end")
            report.operations += event.kind not in ("mark", "begin")
            if event.kind == "mark":
                promised.take(event.mark)
            if moment in kill_at:
                killed.append(Kill(moment, copy.deepcopy(disk), copy.deepcopy(promised)))
            if event.kind == "begin" or moment - before < stride:
                continue
            newest, before = changed and stride == 1, moment
            report.moments += 1
            distinct: set[int] = set()
            for state in self._states(disk, report, newest=newest, width=width):
                key = hash(frozenset(state.items()))
                if key in distinct:
                    continue
                distinct.add(key)
                found = self._look(key, state, shelf, report)
                for text in judge(found, promised, self._known, deferred=self._deferred):
                    report.wrong(f"moment {moment} ({event.kind} {event.path[-60:]}): {text}")
                if keep and not found.wrong:
                    seen[found.position] += 1
                    chosen = crashes.setdefault(found.position, [])
                    crash = Crash(moment, state, found.position, copy.deepcopy(promised))
                    if len(chosen) < keep:
                        chosen.append(crash)
                    elif keep and (at := self._rng.randrange(seen[found.position])) < keep:
                        chosen[at] = crash
        return report, [crash for chosen in crashes.values() for crash in chosen], killed

    def _states(self, disk: Disk, report: Report, *, newest: bool, width: int) -> Iterator[State]:
        for choice in choices(disk, self._rng, newest=newest, width=width):
            report.states += 1
            yield disk.state(choice)

    def _look(self, key: int, state: State, shelf: Shelf, report: Report) -> Found:
        if key not in self._looked:
            shelf.show(state)
            self._looked[key] = found = look(self.job, self._known)
            shelf.touched(self.job.run_dir / "lock")
            shelf.touched(self.job.run_dir / "metrics.jsonl")
            if found.wrong or found.changed:
                shelf.clear()  # there is no telling what was made on the way
            report.distinct += 1
            report.positions[found.position.split()[0]] += 1
        return self._looked[key]

    def resume(self, crashes: Sequence[Crash], disk: Disk) -> Report:
        """Bring the run to its end from each crash; its bits and lines are those of a whole run."""
        report = Report()
        for crash in crashes:
            self._show(crash, disk)
            error = self.job.finish()
            report.resumed += 1
            text = error or self._difference()
            if text:
                report.wrong(f"resumed from moment {crash.moment} ({crash.position}): {text}")
        return report

    def again(self, crashes: Sequence[Crash], disk: Disk, *, width: int, stride: int) -> Report:
        """Record the recovery from each crash, and replay it: the power fails a second time."""
        report = Report()
        for crash in crashes:
            self._show(crash, disk)
            second = Disk(self.job.disks, disk.blobs)
            recording = self.job.record()
            if recording.error:
                report.wrong(f"recovery from moment {crash.moment}: {recording.error}")
                continue
            promised = copy.deepcopy(crash.promised)
            found, *_ = self.replay(second, recording.events, promised, width=width, stride=stride)
            found.recoveries = 1
            report.add(found)
        return report

    def after_kills(self, kills: Sequence[Kill], *, width: int, stride: int) -> Report:
        """Record the recovery from each kill, and cut it: what was not flushed then is not yet."""
        report = Report()
        for kill in kills:
            Shelf(self.job.disks, kill.disk.blobs).show(kill.disk.everything())
            recording = self.job.record()
            if recording.error:
                report.wrong(f"recovery from a kill at moment {kill.moment}: {recording.error}")
                continue
            found, *_ = self.replay(
                kill.disk, recording.events, kill.promised, width=width, stride=stride
            )
            found.recoveries = 1
            report.add(found)
        return report

    def _show(self, crash: Crash, disk: Disk) -> None:
        Shelf(self.job.disks, disk.blobs).show(crash.state)

    def _difference(self) -> str | None:
        found = self.job.end()
        if found == self._end:
            return None
        arrays = [k for k, v in self._end.state.items() if found.state.get(k) != v]
        data = [k for k, v in self._end.data.items() if found.data.get(k) != v]
        return f"arrays {arrays}, tokens {data} differ; lines {found.lines}"
