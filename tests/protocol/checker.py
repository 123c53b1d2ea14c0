"""Enumerates what crashes and I/O errors can leave behind, and recovers from each of it.

A state is where the main thread is in its script, what the committer's thread has still to do, and
the disk. Both threads move in any order that the protocol allows. At each state, and in the middle
of each write, the process is killed or the power fails, and each write and flush may end in an I/O
error; each disk that this can leave behind is a start, from which a process recovers, moves on and
is crashed again, until nothing new is found: so there is no limit to the number of crashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swaptrain.store.recovery import Action
from tests.protocol.disk import TORN, Disk, Image, Place, Undecided
from tests.protocol.recovering import Recovery, Start
from tests.protocol.rules import ALL_RULES, Rule
from tests.protocol.scripts import METRICS, ROOT, STORE, LostError, Op, Scenario, Script, Scripts

__all__ = ["Report", "check"]

Taken = frozenset[tuple[str, int]]
"""Slots that are not free though they are not live, and the segment that is written to them; 0 for
one that a switch has left which is not durable yet."""
Jobs = tuple[tuple[int, ...], ...]
"""By the numbers of their operations, which are quickly compared."""


class _State(NamedTuple):
    script: Script
    position: int
    jobs: Jobs
    """Of the committer: what is left of each job, in order."""
    taken: Taken
    image: Image
    done: frozenset[int]
    """Segments of the running step whose backward has begun."""


@dataclass
class Report:
    """What an enumeration found."""

    scenario: str
    states: int = 0
    """Of running processes."""
    crashes: int = 0
    """Ways in which these ended."""
    disks: int = 0
    """Different disks that they left behind."""
    recoveries: int = 0
    """Of these disks, with each choice of what a power loss left that recovery looks at."""
    lost: Counter[str] = field(default_factory=Counter)
    """Recoveries and steps from which the run cannot go on to the same bits, and why."""
    whole: bool = True
    """Whether the enumeration came to its end within the limit."""
    repeated: int = 0
    """The most segments whose backward was done again after a kill."""

    @property
    def lost_count(self) -> int:
        return sum(self.lost.values())


class _Checker:
    def __init__(self, scenario: Scenario, rules: frozenset[Rule], limit: int) -> None:
        self.scenario, self.rules, self.limit = scenario, rules, limit
        self.scripts = Scripts(scenario, rules)
        self.disk = _disk(self.scripts)
        self.recovery = Recovery(self.scripts, self.disk, rules)
        self.slots = scenario.slots()
        self.report = Report(scenario.name)
        self.seen: set[_State] = set()
        self.stack: list[_State] = []
        self.starts: dict[Image, list[Start]] = {}
        self.ops: list[Op] = []
        self.numbers: dict[Op, int] = {}

    def run(self) -> Report:
        self.crash(self.disk.image(_empty(self.scripts)), frozenset())
        while self.stack:
            if len(self.seen) > self.limit:
                self.report.whole = False
                break
            state = self.stack.pop()
            try:
                for successor in self.successors(state):
                    self.push(successor)
            except LostError as error:
                self.report.lost[str(error)] += 1
        self.report.states = len(self.seen)
        self.report.disks = len(self.starts)
        return self.report

    def push(self, state: _State) -> None:
        if state not in self.seen:
            self.seen.add(state)
            self.stack.append(state)

    def crash(self, image: Image, done: frozenset[int], *, killed: bool = False) -> None:
        """Start over from what is left."""
        self.report.crashes += 1
        image = self.recovery.flush(self.clean(image))
        if image not in self.starts:
            self.starts[image] = self.recover(image)
        if killed:
            self.report.repeated = max(
                [self.report.repeated, *(self.again(start, done) for start in self.starts[image])]
            )

    def recover(self, image: Image) -> list[Start]:
        """Recover from an image, with each content of an undecided place that recovery reads."""
        starts, open_images = [], [image]
        while open_images:
            image = open_images.pop()
            try:
                start = self.recovery.start(image)
            except Undecided as undecided:
                open_images += self.disk.decide(image, undecided.index)
                continue
            except LostError as error:
                self.report.recoveries += 1
                self.report.lost[str(error)] += 1
                continue
            self.report.recoveries += 1
            starts.append(start)
            self.push(_State(start.script, 0, (), frozenset(), image, frozenset()))
        return starts

    def again(self, start: Start, done: frozenset[int]) -> int:
        """Return of how many segments the backward is repeated; without a hand-off, all."""
        if start.decision.action is Action.CONTINUE:
            return sum(1 for k in done if k <= start.decision.segment)
        return 0

    def clean(self, image: Image) -> Image:
        """Put garbage where no recovery may look: what no live name or record can lead to."""
        if self.scenario.commit_every > 1:
            trees = self.disk.may_hold(image, STORE)
            return (
                self.disk.unused(
                    image, (p for p in self.disk.places if p[0] == "tree" and p[1] not in trees)
                )
                if None not in trees
                else image
            )
        live = {
            slot for k in self.scenario.stored for slot in self.disk.may_hold(image, ("live", k))
        }
        rows = set()
        for slot in live - {None}:
            for record in self.disk.may_hold(image, ("slot", slot, "record")):
                if isinstance(record, tuple):
                    rows.update(self.scripts.row(key) for key, _ in record[4])
        return self.disk.unused(
            image,
            (
                p
                for p in self.disk.places
                if (p[0] == "slot" and p[1] not in live) or (p[0] == "gradients" and p not in rows)
            ),
        )

    def successors(self, state: _State) -> Iterator[_State]:
        if state.position < len(state.script.ops):
            op = state.script.ops[state.position]
            yield from self.main(state, op)
        elif state.script.then is not None:
            script = self.scripts.script(state.script.then)
            yield _State(script, 0, state.jobs, state.taken, state.image, frozenset())
        elif not state.jobs:
            self.finished(state)
        first = Rule.COMMITS_IN_ORDER in self.rules
        for number in range(len(state.jobs[:1] if first else state.jobs)):
            yield from self.commit(state, number)

    def main(self, state: _State, op: Op) -> Iterator[_State]:
        """Yield the states behind the main thread's next operation; none if it has to wait."""
        if op[0] == "barrier" and state.jobs:
            return
        moved = state._replace(position=state.position + 1)
        if op[0] == "take":
            used = {slot for slot, _ in state.taken}
            used |= {self.disk.read(state.image, ("live", k)) for k in self.scenario.stored}
            free = [s for s in self.slots[self.scenario.shape_class(op[1])] if s not in used]
            if free:
                yield moved._replace(taken=state.taken | {(free[0], op[1])})
            elif not state.jobs:
                raise LostError(f"no slot is free for segment {op[1]}")
        elif op[0] == "submit":
            job = tuple(self.number(self.bound(o, state.taken)) for o in op[1])
            yield moved._replace(jobs=(*state.jobs, job))
        elif op[0] == "done":
            yield moved._replace(done=state.done | {op[1]})
        elif op[0] == "barrier":
            yield moved
        else:
            for image, taken in self.execute(self.bound(op, state.taken), state):
                yield moved._replace(image=image, taken=taken)

    def commit(self, state: _State, number: int) -> Iterator[_State]:
        """Yield the states behind an operation of the committer's thread."""
        first, *rest = state.jobs[number]
        jobs = (*state.jobs[:number], *((tuple(rest),) if rest else ()), *state.jobs[number + 1 :])
        for image, taken in self.execute(self.ops[first], state):
            yield state._replace(jobs=jobs, image=image, taken=taken)

    def number(self, op: Op) -> int:
        number = self.numbers.setdefault(op, len(self.ops))
        if number == len(self.ops):
            self.ops.append(op)
        return number

    def bound(self, op: Op, taken: Taken) -> Op:
        """Return an operation with the slot that its segment's commit has taken."""
        slots = {k: slot for slot, k in taken}

        def bind(place: Place) -> Place:
            return ("slot", slots[place[1]], place[2]) if place[0] == "new" else place

        if op[0] == "write":
            return ("write", tuple((bind(place), content) for place, content in op[1]), op[2])
        if op[0] == "flush":
            return ("flush", tuple(bind(place) for place in op[1]))
        if op[0] == "rename":
            return ("rename", op[1], slots[op[1]])
        if op[0] == "give":
            return ("give", op[1], slots[op[1]])
        return op

    def execute(self, op: Op, state: _State) -> Iterator[tuple[Image, Taken]]:
        """Do an operation, with every crash and every error in it and behind it."""
        image, taken = state.image, state.taken
        if op[0] == "give":
            yield image, frozenset(row for row in taken if row[1] not in (0, op[1]))
            return
        if op[0] == "flush":
            after = list(self.flush(image, op[1], state.done))
        elif op[0] == "rename":
            before = self.disk.read(image, ("live", op[1]))
            if before is not None:
                taken = taken | {(str(before), 0)}
            after = [self.write(image, ((("live", op[1]), op[2]),), False, state.done)]
        else:
            after = [self.write(image, op[1], op[2], state.done)]
        for image in after:
            self.crash(image, state.done, killed=True)
            self.crash(self.disk.lose_power(image), state.done)
            yield image, taken

    def write(self, image: Image, contents: Any, tears: bool, done: frozenset[int]) -> Image:
        after = image
        for place, content in contents:
            after = self.disk.write(after, place, content, tears=tears)
        if tears:
            torn = image
            for place, _ in contents:
                torn = self.disk.write(torn, place, TORN)
            self.crash(torn, done, killed=True)
        for place, _ in contents:
            if not _is_name(place):  # EIO or ENOSPC: some of it may be written, or all
                self.crash(self.disk.failed(after, place), done)
                if tears:
                    part = self.disk.write(after, place, TORN)
                    self.crash(self.disk.failed(part, place), done)
        return after

    def flush(
        self, image: Image, places: tuple[Place, ...], done: frozenset[int]
    ) -> Iterator[Image]:
        for place in places:
            if not image[self.disk.index[place]].dirty:
                continue
            failed = self.disk.failed(image, place)
            if _is_name(place):
                # A file system that cannot write its directories refuses everything from then on.
                self.crash(self.disk.lose_power(failed), done)
            else:
                self.crash(failed, done)
            if Rule.NO_RETRY not in self.rules:
                yield self.disk.flush(failed, places)  # the second fdatasync reports no error
        yield self.disk.flush(image, places)

    def finished(self, state: _State) -> None:
        """Check that a run that came to its end has all its steps."""
        for k in self.scenario.stored:
            if self.scenario.commit_every > 1:
                place: Place = ("tree", self.disk.read(state.image, STORE), k, "record")
            else:
                place = ("slot", self.disk.read(state.image, ("live", k)), "record")
            record: Any = self.disk.read(state.image, place)
            expected = self.scripts.reference[f"state {k}", self.scenario.steps]
            if record[2:4] != (self.scenario.steps, expected):
                raise LostError(f"the finished run has another segment {k}")
        if self.disk.read(state.image, METRICS) != self.scenario.steps:
            raise LostError("the finished run lacks lines of metrics")


def check(
    scenario: Scenario, rules: frozenset[Rule] = ALL_RULES, *, limit: int = 1_000_000
) -> Report:
    """Enumerate a scenario's states, at most `limit`."""
    return _Checker(scenario, rules, limit).run()


def _is_name(place: Place) -> bool:
    """Whether a place is a name in a directory."""
    return place[0] == "live" or place in (ROOT, STORE) or place[-1] == "root"


def _empty(scripts: Scripts) -> dict[Place, Any]:
    """Return what is on the disk before anything was created."""
    contents: dict[Place, Any] = {METRICS: 0, ROOT: None, STORE: None}
    contents.update({("live", k): None for k in scripts.scenario.stored})
    return contents


def _disk(scripts: Scripts) -> Disk:
    scenario, device = scripts.scenario, {}
    places: list[Place] = [METRICS]
    if scenario.commit_every > 1:
        places.append(STORE)
        for tree in "ab":
            places.append(("tree", tree, "root"))
            for k in scenario.stored:
                places += [("tree", tree, k, "chunks"), ("tree", tree, k, "record")]
    else:
        places.append(ROOT)
        places += [("live", k) for k in scenario.stored]
        slots = [slot for names in scenario.slots().values() for slot in names]
        for number, slot in enumerate(slots):
            for part in ("chunks", "record"):
                places.append(("slot", slot, part))
                device["slot", slot, part] = number % scenario.disks
    places += scripts.spill_places()
    return Disk.of(places, device)
