"""The backing against a model of it: any order of spills, commits and finished gradients.

The machine does as the tier and the commits do: nothing changes while it is written, commits end in
their order, and a gradient is finished once for each commit of its segment.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.durable.location import Location
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.program.model import BufferSpec
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.store.slots.commit import Write
from swaptrain.store.slots.slot import Slot
from tests.program.models import chain, moments, tensor
from tests.support.late_io import LateIO
from tests.support.transition_table import recorded

SEGMENTS, MICRO_BATCHES, ELEMENTS = (1, 2), 2, 4096


def layouts() -> Layouts:
    """Return those of two segments, updated in parts, the first with buffers."""
    model = chain(len(SEGMENTS), MICRO_BATCHES, elements=ELEMENTS).model
    first = replace(model.segments[0], buffers=("b1",))
    model = replace(
        model,
        segments=(first, *model.segments[1:]),
        buffers={"b1": BufferSpec(tensor("b1", 2))},
    )
    return Layouts(
        model,
        compute_dtype="bfloat16",
        state_shapes=moments,
        elementwise=lambda _: True,
        chunk_bytes=8192,
        micro_batches=MICRO_BATCHES,
    )


LAYOUTS = layouts()
STATE = {
    k: [key for a in LAYOUTS.state[k].arrays for key in LAYOUTS.state_keys(k, a.name)]
    for k in SEGMENTS
}
BUFFER = next(key for key in STATE[1] if key.name.startswith("buffers_"))
SUMS = [ObjectKey(Kind.ACCUMULATOR, "gradient", k) for k in SEGMENTS]
MADE = [
    *(ObjectKey(Kind.VALUE, "v1", 1, m) for m in range(MICRO_BATCHES)),
    *(ObjectKey(Kind.GRADIENT, "v1", 2, m) for m in range(MICRO_BATCHES)),
    *SUMS,
]
SAMPLE = [*MADE, BUFFER, STATE[1][1], STATE[2][-1]]


def slot_at(path: Path, k: int) -> Slot:
    """Return a slot without files: what is asked of it is where its arrays would be."""
    slot = Slot(path)
    arrays = {a.name: ArrayFiles.of_layout(path / a.name, a) for a in LAYOUTS.state[k].arrays}
    vars(slot)["arrays"] = arrays  # else read from the disk when it is first asked for
    return slot


class BackingMachine(RuleBasedStateMachine):
    """Random events against the content that each object should have."""

    deferred = True

    @initialize(verify=st.sampled_from(["always", "first_read"]))
    def start(self, verify: Any) -> None:
        self.recording = recorded(Location, "state")
        self.recording.__enter__()
        self.io, self.pool, self.stamps = LateIO(), PagePool(1 << 26), count(1)
        self.backing = DiskBacking(
            Path("run"),
            LAYOUTS,
            cast(Any, self.io),
            micro_batches=MICRO_BATCHES,
            deferred=self.deferred,
            verify=verify,
            wait=self.io.wait,
        )
        self.backing.barrier = self.end_commits
        self.content: dict[ObjectKey, int] = {}
        self.slabs: dict[ObjectKey, Slab] = {}
        self.clean: set[ObjectKey] = set()
        self.under_way: dict[ObjectKey, list[Future[Any]]] = {}
        self.commits: list[tuple[Future[None], Any]] = []
        """Submitted and not durable, with what makes them so, in order."""
        self.begun: dict[int, list[ObjectKey]] = {}
        """By segment of which parts are updated: what is not."""
        self.finished: set[int] = set()
        """Segments whose finished gradient waits for its update."""
        self.needed: dict[int, tuple[list[Path], bytes]] = {}
        """By segment: files that recovery needs, and their content."""
        self.slots = {k: [slot_at(Path(f"slots/{k}{i}"), k) for i in "ab"] for k in SEGMENTS}
        for k in SEGMENTS:
            self.backing.point(k, self.slots[k][0])
            for key in STATE[k]:
                self.content[key] = next(self.stamps)
                self.put(self.backing.in_slot(key, self.slots[k][0]), self.bytes_of(key))
            for array in LAYOUTS.state[k].arrays:
                sums = self.sums(self.slots[k][0].array(array.name))
                for key in LAYOUTS.state_keys(k, array.name):
                    self.backing.found_live(key, sums)

    def bytes_of(self, key: ObjectKey) -> bytes:
        return bytes([self.content[key] % 251]) * self.backing.size_bytes(key)

    def put(self, files: ArrayFiles, content: bytes) -> None:
        size = files.chunk_bytes
        for number, path in enumerate(files.files()):
            self.io.disk[path] = content[size * number : size * (number + 1)]

    def wait_for(self, key: ObjectKey) -> None:
        """Wait as the tier does before it changes or drops an object."""
        for future in self.under_way.pop(key, []):
            if any(future is found for found, _ in self.commits):
                self.end_commits()
            self.io.wait([future])

    def fill(self, key: ObjectKey) -> None:
        self.wait_for(key)
        if key not in self.slabs:
            self.slabs[key] = self.pool.take(self.backing.size_bytes(key))
        self.content[key] = next(self.stamps)
        self.slabs[key].memory[:] = self.bytes_of(key)
        self.clean.discard(key)

    def bring(self, key: ObjectKey) -> Slab:
        if key not in self.slabs:
            slab = self.slabs[key] = self.pool.take(self.backing.size_bytes(key))
            self.io.wait(self.backing.read(key, slab))
            assert bytes(slab.memory) == self.bytes_of(key), key
            self.clean.add(key)
        return self.slabs[key]

    def submit(self, end: Any) -> Future[None]:
        future: Future[None] = Future()
        self.commits.append((future, end))
        return future

    def saved(self, key: ObjectKey, *futures: Future[Any]) -> None:
        self.under_way.setdefault(key, []).extend(futures)
        self.clean.add(key)

    def written(self, writes: list[Write]) -> None:
        """Write as a commit does on its own thread, and note the checksums."""
        for write in writes:
            sums = write.array.write(cast(Any, self.io), write.buffer, row=write.row, flush=True)
            self.io.wait(sums)
            noted = [future.result() for future in sums]
            self.backing.note_checksums(write.array.place(write.row), noted)

    def end_commits(self) -> None:
        while self.commits:
            self.end_commit()

    @precondition(lambda self: self.commits)
    @rule()
    def end_commit(self) -> None:
        """The first commit that was submitted becomes durable."""
        future, end = self.commits.pop(0)
        end()
        future.set_result(None)

    @precondition(lambda self: self.io.pending)
    @rule(data=st.data())
    def transfer(self, data: st.DataObject) -> None:
        """One transfer happens, in any order."""
        self.io.complete(data.draw(st.integers(0, len(self.io.pending) - 1)))

    @rule(key=st.sampled_from([*MADE, BUFFER]))
    def change(self, key: ObjectKey) -> None:
        self.changed(key)

    def changed(self, key: ObjectKey) -> bool:
        """The program makes or changes an object, but no finished gradient.

        Where sums share a place there are those of one segment at a time.
        """
        finished = key in SUMS and key.segment in self.finished
        alone = self.deferred or key not in SUMS or {*SUMS}.isdisjoint({*self.content} - {key})
        if finished or not alone:
            return False
        if key in self.content:
            self.bring(key)
        self.fill(key)
        return True

    @rule(key=st.sampled_from([*MADE, BUFFER]))
    def spill(self, key: ObjectKey) -> None:
        """What the program made or changed leaves memory."""
        if self.changed(key):
            self.saved(key, *self.backing.write(key, self.slabs[key]))

    @rule(key=st.sampled_from(SAMPLE))
    def evict(self, key: ObjectKey) -> None:
        if key in self.slabs and key in self.clean:
            self.wait_for(key)
            del self.slabs[key]

    @rule(key=st.sampled_from(SAMPLE))
    def read(self, key: ObjectKey) -> None:
        """What is read back is what was last written."""
        self.evict(key)
        if key in self.content:
            self.bring(key)

    @rule(key=st.sampled_from(MADE))
    def free(self, key: ObjectKey) -> None:
        """The program needs an object no more, though it may still be written."""
        if key in self.content and not (key in SUMS and key.segment in self.finished):
            self.backing.forget(key)
            del self.content[key]
            self.slabs.pop(key, None)
            self.clean.discard(key)

    @rule(key=st.sampled_from(MADE[:MICRO_BATCHES]))
    def save_activation(self, key: ObjectKey) -> None:
        if self.changed(key):
            write, _ = self.backing.value_write(key, self.slabs[key])
            (future,) = write.array.write(
                cast(Any, self.io), write.buffer, row=write.row, flush=False
            )
            self.backing.writing(key, future)
            self.saved(key, future)

    @rule(key=st.sampled_from(MADE[MICRO_BATCHES : 2 * MICRO_BATCHES]))
    def hand_on(self, key: ObjectKey) -> None:
        if self.changed(key):
            write = self.backing.handoff_write(key, self.slabs[key])
            self.saved(key, self.submit(lambda: self.written([write])))

    @rule(k=st.sampled_from(SEGMENTS))
    def update(self, k: int) -> None:
        """A segment is updated, and the finished gradient that it took is freed."""
        self.begin_update(k)
        self.end_update(k)

    @rule(k=st.sampled_from(SEGMENTS))
    def begin_update(self, k: int) -> None:
        """All parts but the last are updated, and begin to be written into the free slot."""
        if k in self.begun:
            return
        self.end_commits()  # one of them may still have the free slot
        last = LAYOUTS.parts[k] - 1
        parts = [key for key in STATE[k] if 0 <= key.part < last]
        for key in parts:
            self.bring(key)
            self.fill(key)
            futures = self.begin_write(key, self.slots[k][1])
            self.saved(key, *futures)
            self.backing.begin_part(key, self.slots[k][1], futures)
        self.begun[k] = [key for key in STATE[k] if key not in parts]

    def begin_write(self, key: ObjectKey, slot: Slot) -> list[Future[int]]:
        files = self.backing.in_slot(key, slot)
        return files.write(cast(Any, self.io), self.slabs[key].memory, flush=True)

    @rule(k=st.sampled_from(SEGMENTS))
    def end_update(self, k: int) -> None:
        """The last part is updated, and the segment's commit submitted."""
        if k not in self.begun:
            return
        slot = self.slots[k][1]
        futures = []
        for key in self.begun.pop(k):
            self.bring(key)
            self.fill(key)
            writes = self.begin_write(key, slot)
            self.saved(key, *writes)
            futures += writes

        def end() -> None:
            self.io.wait(futures)
            for key in STATE[k]:
                files = self.backing.in_slot(key, slot)
                self.io.wait(self.under_way.get(key, []))
                self.backing.note_checksums(files.place(None), self.sums(files))
            self.needed.pop(k, None)

        self.backing.commit(k, slot)
        self.slots[k].reverse()
        future = self.submit(end)
        for key in STATE[k]:
            self.saved(key, future)
        if k in self.finished:
            self.finished.discard(k)
            self.free(SUMS[k - 1])

    def sums(self, files: ArrayFiles) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self.io.disk[path]) for path in files.files()]

    @precondition(lambda self: self.deferred)
    @rule(k=st.sampled_from(SEGMENTS))
    def finish_gradient(self, k: int) -> None:
        """A gradient is finished, and becomes durable with the buffers of its segment."""
        if k in self.begun or not self.changed(SUMS[k - 1]):
            return
        keys = [SUMS[k - 1], *(key for key in [BUFFER] if key.segment == k)]
        for key in keys:
            self.bring(key)
            self.wait_for(key)
        writes = [self.backing.finished_write(key, self.slabs[key]) for key in keys]
        content = self.bytes_of(SUMS[k - 1])

        def end() -> None:
            self.written(writes)
            self.needed[k] = writes[0].array.files(), content

        future = self.submit(end)
        for key in keys:
            self.saved(key, future)
        self.finished.add(k)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every object is in memory or on the disk."""
        for key in getattr(self, "content", ()):
            assert key in self.slabs or self.backing.holds(key), key

    @invariant()
    def recovery_finds_each_gradient_until_its_update_is_durable(self) -> None:
        """A kill at any moment finds the gradient that the update of the next step takes."""
        for files, content in getattr(self, "needed", {}).values():
            assert b"".join(self.io.disk[path] for path in files) == content, files

    def teardown(self) -> None:
        """No state of an object changed but by a transition of the table."""
        if hasattr(self, "recording"):
            self.recording.__exit__(None, None, None)


class FusedBackingMachine(BackingMachine):
    """The same where no gradient is finished: the sums of all segments share one place."""

    deferred = False


TestDeferred = BackingMachine.TestCase
TestDeferred.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestFused = FusedBackingMachine.TestCase
TestFused.settings = TestDeferred.settings


def test_a_write_waits_for_that_of_the_object_before_it_in_the_same_place() -> None:
    """Else the bytes of the dead object could reach the disk last."""
    machine = FusedBackingMachine()
    machine.start("first_read")
    first, second = SUMS
    machine.spill(first)
    machine.free(first)
    machine.spill(second)
    while machine.io.pending:
        machine.io.complete(len(machine.io.pending) - 1)
    machine.read(second)
    machine.teardown()


def test_a_gradient_overwrites_its_row_only_when_all_commits_are_durable() -> None:
    """The hand-off of the last durable commit may be what lies there."""
    machine = FusedBackingMachine()
    machine.start("first_read")
    gradient = next(key for key in MADE if key.kind is Kind.GRADIENT)
    machine.hand_on(gradient)
    machine.free(gradient)
    assert machine.commits
    machine.spill(gradient)
    assert not machine.commits
    machine.teardown()
