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

from swaptrain.store.slots.recovery_rules import Action
from tests.protocol.disk import TORN, Image, Place, Undecided
from tests.protocol.layout import disk_of, empty, is_name
from tests.protocol.recovering import Recovery, Start
from tests.protocol.rules import ALL_RULES, Rule
from tests.protocol.run import METRICS, STORE, LostError, Op, Scenario, Script
from tests.protocol.scripts import Scripts

__all__ = ["Report", "check"]

Taken = frozenset[tuple[str, int]]
"""Slots that are not free though they are not live, and the segment that is written to them; 0 for
one that a switch has left which is not durable yet."""
Jobs = tuple[tuple[int, ...], ...]
"""By the numbers of their operations, which are quickly compared."""


Done = frozenset[tuple[str, int]]
"""Of the running step: which segments' forward or backward counts as begun."""


class _State(NamedTuple):
    script: Script
    position: int
    jobs: Jobs
    """Of the committer: what is left of each job, in order."""
    taken: Taken
    image: Image
    done: Done


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
    """The most segments whose backward, or forward, was done again after a kill, where the protocol
    bounds it: not where whole trees are committed."""

    @property
    def lost_count(self) -> int:
        return sum(self.lost.values())


class _Checker:
    def __init__(self, scenario: Scenario, rules: frozenset[Rule], limit: int) -> None:
        self.scenario, self.rules, self.limit = scenario, rules, limit
        self.scripts = Scripts(scenario, rules)
        self.disk = disk_of(scenario)
        self.recovery = Recovery(self.scripts, self.disk, rules)
        self.slots = scenario.slots()
        self.report = Report(scenario.name)
        self.seen: set[_State] = set()
        self.stack: list[_State] = []
        self.starts: dict[Image, list[Start]] = {}
        self.ops: list[Op] = []
        self.numbers: dict[Op, int] = {}

    def run(self) -> Report:
        self.crash(self.disk.image(empty(self.scenario)), None)
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

    def crash(self, image: Image, state: _State | None, *, killed: bool = False) -> None:
        """Start over from what is left."""
        self.report.crashes += 1
        image = self.recovery.flush(self.clean(image))
        if image not in self.starts:
            self.starts[image] = self.recover(image)
        if killed and state is not None:
            done, step = state.done, state.script.step
            again = (self.again(start, done, step) for start in self.starts[image])
            self.report.repeated = max([self.report.repeated, *again])

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

    def again(self, start: Start, done: Done, step: int) -> int:
        """Return of how many segments a pass is repeated."""
        decision = start.decision
        if self.scenario.is_whole or decision.step > step:
            return 0
        backwards = {k for what, k in done if what == "backward"}
        if decision.action is Action.CONTINUE:
            backwards = {k for k in backwards if k <= decision.segment}
        forwards = {k for what, k in done if what == "forward" and k in start.script.forwards}
        return max(len(backwards), len(forwards) if self.scenario.values else 0)

    def clean(self, image: Image) -> Image:
        """Put garbage where no recovery may look: what no live name or record can lead to.

        Values of earlier steps are such: a step begins when the one before is durable.
        """
        if Rule.ONE_SEGMENT in self.rules:
            values = (place for place in self.disk.places if place[0] == "values")
            image = self.disk.keep_newest(image, values)
        if self.scenario.is_whole:
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
        named: list[Place] = [("slot", slot, "record") for slot in live - {None}]
        named += [p for p in self.disk.places if p[0] == "finished" and p[2] == "record"]
        for place in named:
            for record in self.disk.may_hold(image, place):
                if isinstance(record, tuple):
                    rows.update(self.scripts.places.row(key) for key, _ in record[4])
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
            yield moved._replace(done=state.done | {op[1:]})
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
            after = list(self.flush(image, op[1], state))
        elif op[0] == "rename":
            before = self.disk.read(image, ("live", op[1]))
            if before is not None:
                taken = taken | {(str(before), 0)}
            after = [self.write(image, ((("live", op[1]), op[2]),), False, state)]
        else:
            after = [self.write(image, op[1], op[2], state)]
        for image in after:
            self.crash(image, state, killed=True)
            self.crash(self.disk.lose_power(image), state)
            yield image, taken

    def write(self, image: Image, contents: Any, tears: bool, state: _State) -> Image:
        after = image
        for place, content in contents:
            after = self.disk.write(after, place, content, tears=tears)
        if tears:
            torn = image
            for place, _ in contents:
                torn = self.disk.write(torn, place, TORN)
            self.crash(torn, state, killed=True)
        for place, _ in contents:
            if not is_name(place):  # EIO or ENOSPC: some of it may be written, or all
                self.crash(self.disk.failed(after, place), state)
                if tears:
                    part = self.disk.write(after, place, TORN)
                    self.crash(self.disk.failed(part, place), state)
        return after

    def flush(self, image: Image, places: tuple[Place, ...], state: _State) -> Iterator[Image]:
        for place in places:
            if not image[self.disk.index[place]].dirty:
                continue
            failed = self.disk.failed(image, place)
            if is_name(place):
                # A file system that cannot write its directories refuses everything from then on.
                self.crash(self.disk.lose_power(failed), state)
            else:
                self.crash(failed, state)
            if Rule.NO_RETRY not in self.rules:
                yield self.disk.flush(failed, places)  # the second fdatasync reports no error
        yield self.disk.flush(image, places)

    def finished(self, state: _State) -> None:
        """Check that a run that came to its end has all its steps."""
        for k in self.scenario.stored:
            if self.scenario.is_whole:
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
