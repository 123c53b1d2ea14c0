"""What makes a step durable: which bytes a commit writes and what its record says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from swaptrain.compute.slab_tensors import Slabs
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.durable.handoff import HandoffWriter
from swaptrain.durable.ledger import Ledger
from swaptrain.memory.tier import Tier
from swaptrain.program.durability import Made
from swaptrain.program.instructions import Instruction, ObjectKey
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.record import record_size
from swaptrain.store.format.state_record import (
    blank_checksums,
    finished_record,
    handoff_row,
    state_record,
)
from swaptrain.store.slots.commit import Checksums, Committer, Started, Write
from swaptrain.store.slots.slot import Slot

__all__ = ["Commits", "record_bytes"]


class Commits:
    """Submits commits of segments and of spilled gradients for one run.

    With the unit `segment` a fused step commits each segment after its update, with the hand-off.
    With the unit `step` every m-th step (`store.commit.every`) writes the whole store to the other
    tree.
    """

    def __init__(
        self,
        layouts: Layouts,
        backing: DiskBacking,
        tier: Tier,
        committer: Committer,
        *,
        fingerprint: str,
    ) -> None:
        self._layouts, self._backing, self._tier = layouts, backing, tier
        self._committer = committer
        self._fingerprint = fingerprint
        self.handoff = HandoffWriter(backing, tier)
        self._slot: Slot
        """Which the parts of the update that is under way are written to."""
        self._begun: list[Started] = []
        """What was begun to be written of that update."""

    def commit_segment(
        self, instruction: Instruction, made: Made, slabs: Slabs, version: int, ledger: Ledger
    ) -> None:
        """Commit a segment's state as `version`, and the hand-off with it.

        After all parts of an update but the last one, only begin to write what they changed.
        """
        k = instruction.segment
        if not instruction.part:
            with self._tier.counters.waiting("wait for a slot"):
                self._slot = self._committer.take(self._layouts.state[k].shape_class)
        slot = self._slot
        if instruction.goes_on:
            for key, started in self._begin(made, slabs, slot):
                self._backing.begin_part(key, slot, started.futures)
            return
        handed_on = self.handoff.take(made)
        make = self._state_record(k, version, ledger)
        writes = self._writes(made, slabs, slot)
        states, self._begun = [*self._begun, *self._committer.begin(writes)], []

        def record(checksums: Checksums) -> dict[str, Any]:
            self._note(states, checksums, handed_on.writes)
            return make(checksums, handed_on.rows(checksums.handoff))

        # Before it is submitted, since it notes its checksums at the places that are known by then.
        self._backing.commit(k, slot)
        future = self._committer.commit(k, slot, record, states, handed_on.writes)
        # Before the next instruction. Were one of these objects changed while it is written, the
        # slot would have bytes of two versions, and the record the checksum of one.
        self._tier.saving([*made.objects, *handed_on.in_memory], future)

    def _begin(self, made: Made, slabs: Slabs, slot: Slot) -> list[tuple[ObjectKey, Started]]:
        """Begin to write what a part of an update changed, for the commit after the last one."""
        writes = self._committer.begin(self._writes(made, slabs, slot))
        parts = list(zip(made.objects, writes, strict=True))
        for key, started in parts:
            self._tier.saving([key], *started.futures)
        self._begun += writes
        return parts

    def _writes(self, made: Made, slabs: Slabs, slot: Slot) -> list[Write]:
        return [Write(self._backing.in_slot(key, slot), slabs[key].memory) for key in made.objects]

    def write_segment(
        self, instruction: Instruction, made: Made, slabs: Slabs, version: int, ledger: Ledger
    ) -> None:
        """Write a segment's state into its slot of the other tree (with the unit `step`)."""
        k = instruction.segment
        slot = self._backing.scratch(k)
        for key in made.objects:
            self._backing.spilled(key)
        if instruction.goes_on:
            self._begin(made, slabs, slot)
            return
        make = self._state_record(k, version, ledger)
        writes = self._writes(made, slabs, slot)
        states, self._begun = [*self._begun, *self._committer.begin(writes)], []

        def record(checksums: Checksums) -> dict[str, Any]:
            self._note(states, checksums)
            return make(checksums, [])

        future = self._committer.commit(k, slot, record, states, switch=False)
        self._tier.saving(made.objects, future)

    def finish_gradient(
        self, instruction: Instruction, made: Made, slabs: Slabs, version: int, ledger: Ledger
    ) -> None:
        """Make a segment's finished gradient durable beside its slot, when its update is deferred.

        With it go the buffers that its forward changes, and the hand-off.
        """
        k, keys = instruction.segment, made.objects
        path = self._backing.files.record(k)
        losses, norms = ledger.in_order(), ledger.of(self._layouts.model.segment(k).owns)
        scale = ledger.recorded_scale()
        handed_on = self.handoff.take(made)
        own = [self._backing.finished_write(key, slabs[key]) for key in keys]
        writes = [*own, *handed_on.writes]

        def record(checksums: Checksums) -> dict[str, Any]:
            self._note([], checksums, writes)
            sums, rest = checksums.handoff[: len(keys)], checksums.handoff[len(keys) :]
            return finished_record(
                segment=k,
                version=version,
                fingerprint=self._fingerprint,
                checksums=dict(zip((key.name for key in keys), sums, strict=True)),
                handoff=handed_on.rows(rest),
                losses=losses,
                norms=norms,
                scale=scale,
            )

        # In place, over the gradient of the step before. The committer goes in order: the commit
        # of the update that took that one is durable before this begins to write. Were it not,
        # a kill in between would find the segment one step behind, and no gradient for it.
        future = self._committer.write(path, path.stat().st_size, record, writes)
        self._tier.saving([*keys, *handed_on.in_memory], future)

    def then(self, action: Callable[[], None]) -> Future[None]:
        """Run `action` when everything submitted so far is durable."""
        return self._committer.then(action)

    def barrier(self) -> None:
        """Wait like `drain`, and count the seconds."""
        with self._tier.counters.waiting("wait for a commit"):
            self._committer.drain()

    def drain(self) -> None:
        """Wait until everything submitted is durable; raise the error of what failed."""
        self._committer.drain()

    def _note(
        self, states: Iterable[Started], checksums: Checksums, others: Iterable[Write] = ()
    ) -> None:
        """Let the backing know the checksums of what a commit wrote."""
        for state in states:
            files = state.array
            sums = checksums.arrays[files.name][files.first : files.first + files.chunks]
            self._backing.note_checksums(files.place(state.row), sums)
        for write, sums in zip(others, checksums.handoff, strict=True):
            self._backing.note_checksums(write.array.place(write.row), sums)

    def _state_record(
        self, k: int, version: int, ledger: Ledger
    ) -> Callable[[Checksums, list[dict[str, Any]]], dict[str, Any]]:
        """Return what makes the record of a segment from its checksums and its hand-off."""
        losses, norms = ledger.in_order(), ledger.of(self._layouts.model.segment(k).owns)
        scale = ledger.recorded_scale()

        def make(checksums: Checksums, handoff: list[dict[str, Any]]) -> dict[str, Any]:
            return state_record(
                segment=k,
                version=version,
                fingerprint=self._fingerprint,
                layout=self._layouts.state[k],
                checksums=checksums.arrays,
                handoff={"gradients": handoff},
                losses=losses,
                norms=norms,
                scale=scale,
            )

        return make


def record_bytes(
    layouts: Layouts, k: int, fingerprint: str, *, micro_batches: int, handoff: Iterable[ObjectKey]
) -> int:
    """Return the bytes to reserve for the records of segment `k`: of its slot, of its gradient."""
    number, real = (1 << 64) - 1, -1.2345678901234567e-300
    norms = dict.fromkeys(layouts.model.segment(k).owns, real)
    losses = [real] * micro_batches
    scale = [real, number, number]
    checksums = blank_checksums(layouts.state[k])
    if k in layouts.accumulators:
        checksums["gradient"] = [number] * layouts.accumulators[k].chunks
    rows = [
        handoff_row(key, [number] * layouts.array(key).chunks, 2 * micro_batches) for key in handoff
    ]
    finished = finished_record(
        segment=k,
        version=number,
        fingerprint=fingerprint,
        checksums=checksums,
        handoff=rows,
        losses=losses,
        norms=norms,
        scale=scale,
    )
    state = state_record(
        segment=k,
        version=number,
        fingerprint=fingerprint,
        layout=layouts.state[k],
        checksums=blank_checksums(layouts.state[k]),
        handoff={"gradients": rows},
        losses=losses,
        norms=norms,
        scale=scale,
    )
    return max(record_size(finished), record_size(state))
