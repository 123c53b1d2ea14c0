"""The disk side of the RAM tier: which file holds the current version of each object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal

from swaptrain.durable.location import (
    ABSENT,
    BEGUN,
    FINISHED,
    LIVE,
    SPILLED,
    Location,
    LocationEvent,
)
from swaptrain.durable.object_places import ObjectPlaces
from swaptrain.durable.spill_files import SpillFiles
from swaptrain.memory.backing import Wait
from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.program.roles import Role
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.slots.array_files import ArrayFiles, Place
from swaptrain.store.slots.commit import Write
from swaptrain.store.slots.slot import Slot

__all__ = ["DiskBacking"]


class DiskBacking:
    """Implements `memory.backing.Backing` over a run directory: one `Location` for each object.

    State lies in the slot of its newest version, live or being committed. Values, gradients,
    accumulators and buffers between two commits lie in `files`, outside the zarr root. All methods
    but `note_checksums` are called on the main thread.
    """

    def __init__(
        self,
        run_dir: Path,
        layouts: Layouts,
        io: DirectIO,
        *,
        micro_batches: int,
        deferred: bool = False,
        verify: Literal["always", "first_read", "never"] = "first_read",
        wait: Wait = wait,
    ) -> None:
        """Take the layout of a run and its disks; `wait` is given only where time is imagined."""
        self.files = SpillFiles(run_dir, layouts, micro_batches=micro_batches, deferred=deferred)
        self.places = ObjectPlaces(run_dir, layouts, self.files, micro_batches=micro_batches)
        self._layouts, self._io, self._verify, self._wait = layouts, io, verify, wait
        self.barrier: Callable[[], None] = lambda: None
        """Waits until every commit submitted so far is durable."""
        self._slots: dict[int, Slot] = {}
        """By segment: the slot with the newest version of its state."""
        self._scratch: dict[int, Slot] = {}
        """By segment, with the unit `step`: its slot in the tree that is not live."""
        self._locations: dict[ObjectKey, Location] = {}
        """Of objects that the program has asked for, or that a resume found."""
        self._last_at: dict[Place, Location] = {}
        """By place: the same record, of the object that came there last."""

    def size_bytes(self, key: ObjectKey) -> int:
        return self._layouts.size_bytes(key)

    def holds(self, key: ObjectKey) -> bool:
        if key.kind is Kind.SHARED:
            return False
        return key.kind is Kind.STATE or self._location(key).state in (SPILLED, FINISHED)

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        location = self._location(key)
        return location.files.read(
            self._io,
            slab.memory,
            row=location.row,
            checksums=self._expected(location),
            segment=key.segment or None,
        )

    def _expected(self, location: Location) -> Sequence[int] | None:
        """Return the checksums to compare a read with; what is read has been written to its end."""
        if self._verify == "never":
            return None
        found = location.checksums
        if self._verify == "first_read":
            location.checksums = None
        if found is None:
            return None
        return [sum if isinstance(sum, int) else sum.result() for sum in found]

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        files, row = self.saved_place(key)
        self._claim(files.place(row))
        location = self._location(key)
        if location.recovery_needs and location.place == files.place(row):
            # Step s finishes the gradient of segment k. Step s+1 takes it for the update of k,
            # whose commit is under way, and its backward spills the next sums over it. Without the
            # barrier, a kill before that commit finds k at s-1 and no gradient of step s.
            self.barrier()
        if key.kind is Kind.GRADIENT:
            # Rows alternate: segment 5 hands on row 0, segment 4 row 1, segment 3 row 0 again.
            # Without the barrier, segment 3 spills while only the commit of 5 is durable: a kill
            # before that of 4 finds a step that goes on after segment 5, whose hand-off is gone.
            self.barrier()
            # The next commit names it as it is on the disk (`HandoffWriter.take`). Were it not
            # flushed, a power loss after that commit would find its record, and another gradient.
            futures = files.write(self._io, slab.memory, row=row, flush=True)
        else:
            # What autograd saved is large, and gone with the process: no checksum, unless asked.
            checksum = key.kind is not Kind.SAVED or self._verify == "always"
            futures = files.write(self._io, slab.memory, row=row, flush=False, checksum=checksum)
        location = self._move(key, "spill", files, row)
        location.writing = futures
        if self._verify == "always":
            location.checksums = futures
        return futures

    def forget(self, key: ObjectKey) -> None:
        if key.kind is Kind.SHARED:  # it has no place on this disk
            return
        location = self._location(key)
        if key.kind is not Kind.STATE:
            location.apply("free")
        elif location.state is not LIVE:
            self._move(key, "revert", *self._newest_place(key))

    def in_slot(self, key: ObjectKey, slot: Slot) -> ArrayFiles:
        """Return where an array of a segment's state, or a part of one, lies in a slot."""
        files = slot.array(key.name)
        return files if key.part < 0 else files.part(*self._layouts.chunks_of(key))

    def begin_part(self, key: ObjectKey, slot: Slot, futures: Sequence[Future[int]]) -> None:
        """Note that a part of a segment's state is written into `slot`, ahead of the rest."""
        location = self._move(key, "begin", self.in_slot(key, slot), None)
        if self._verify == "always":
            location.checksums = futures

    def commit(self, segment: int, slot: Slot) -> None:
        """Note that a commit, which is not submitted yet, writes the segment's state into `slot`.

        The commit notes its checksums, on its own thread, at the places that are known by then.
        """
        self._slots[segment] = slot
        for key in self._state_keys(segment):
            location = self._location(key)
            if location.state is BEGUN:
                location.apply("commit")
            else:
                self._move(key, "commit", self.in_slot(key, slot), None)

    def note_checksums(self, written: Place, checksums: Sequence[int]) -> None:
        """Note the checksums of what a commit wrote; on the committer's thread."""
        location = self._last_at.get(written)
        if self._verify == "always" and location is not None and location.place == written:
            location.checksums = list(checksums)

    def spilled(self, key: ObjectKey) -> None:
        """Note that a commit writes the object to the place where it is spilled."""
        self._move(key, "spill", *self.saved_place(key)).writing = ()

    def handoff_write(self, key: ObjectKey, slab: Slab) -> Write:
        """Return the write that puts a gradient in its own place for good."""
        files, row = self.saved_place(key)
        self._claim(files.place(row))
        self.spilled(key)
        return Write(files, slab.memory, row)

    def value_write(self, key: ObjectKey, slab: Slab) -> tuple[Write, int]:
        """Return the write that saves a value or buffers, and its place in the journal.

        `writing` follows, with the future of the write.
        """
        place = self.places.in_journal(key)
        assert place is not None
        return self.handoff_write(key, slab), place

    def writing(self, key: ObjectKey, future: Future[Any]) -> None:
        """Note a write of an object, for which the next one to the same place has to wait."""
        self._location(key).writing = (future,)

    def finished_write(self, key: ObjectKey, slab: Slab) -> Write:
        """Return the write of a segment's finished gradient, or of the buffers beside it."""
        files = self.places.finished(key)
        # No barrier: the commits before, that of the update that took the last gradient among
        # them, are durable when the committer's thread comes to this write.
        self._claim(files.place(None))
        self._move(key, "finish", files, None)
        return Write(files, slab.memory)

    def spill_checksums(self, key: ObjectKey) -> Sequence[Future[int]]:
        """Return the checksums of a gradient that was spilled, flushed; none if it was not."""
        location = self._location(key)
        return location.writing if location.state is SPILLED else ()

    def saved_place(self, key: ObjectKey) -> tuple[ArrayFiles, int | None]:
        """Return where an object lies when it is spilled or handed on, known to be there or not."""
        if key.kind is Kind.STATE and key.segment in self._scratch:
            return self.in_slot(key, self._scratch[key.segment]), None
        return self.places.spilled(key)

    def point(self, segment: int, slot: Slot, scratch: Slot | None = None) -> None:
        """Let a segment's state be read from `slot`, and where there are trees spill to `scratch`.

        Of a switch of trees: what was spilled lies in `slot`, the scratch of before.
        """
        self._slots[segment] = slot
        if scratch is not None:
            self._scratch[segment] = scratch
        for key in self._state_keys(segment):
            if key in self._locations:
                self._locations[key].apply("switch")
                if self._locations[key].place != self.in_slot(key, slot).place(None):
                    self._put(key, self.in_slot(key, slot), None)

    def slot(self, segment: int) -> Slot:
        """Return the slot with the newest version of a segment's state."""
        return self._slots[segment]

    def scratch(self, segment: int) -> Slot:
        """Return the segment's slot in the tree that is not live."""
        return self._scratch[segment]

    def found_live(self, key: ObjectKey, checksums: Sequence[int]) -> None:
        """Let the next read of state compare it with the checksums of its array's record."""
        location = self._location(key)
        first = location.files.first
        location.checksums = checksums[first : first + location.files.chunks]

    def found_spilled(self, key: ObjectKey, checksums: Sequence[int]) -> None:
        """Take over what an earlier process handed on, or saved of a forward."""
        self._move(key, "spill", *self.saved_place(key)).checksums = checksums

    def found_finished(self, key: ObjectKey, checksums: Sequence[int]) -> None:
        """Take over a finished gradient of an earlier process, or the buffers beside it."""
        self._move(key, "finish", self.places.finished(key), None).checksums = checksums

    def locations(self) -> Iterable[Location]:
        """Return the records of the objects that were asked for or found, for a look at them."""
        return self._locations.values()

    def _location(self, key: ObjectKey) -> Location:
        location = self._locations.get(key)
        if location is None:
            if key.kind is Kind.STATE:
                location = Location(key, *self._newest_place(key), LIVE)
            else:
                location = Location(key, *self.places.spilled(key), ABSENT)
            self._locations[key] = location
        return location

    def _newest_place(self, key: ObjectKey) -> tuple[ArrayFiles, None]:
        if key.role is Role.FROZEN:
            return self.places.frozen(key), None
        return self.in_slot(key, self._slots[key.segment]), None

    def _move(
        self, key: ObjectKey, event: LocationEvent, files: ArrayFiles, row: int | None
    ) -> Location:
        """Let an event bring an object to a place, with nothing to compare it with yet."""
        self._location(key).apply(event)
        return self._put(key, files, row)

    def _put(self, key: ObjectKey, files: ArrayFiles, row: int | None) -> Location:
        location = self._locations[key]
        location.files, location.row, location.checksums = files, row, None
        self._last_at[location.place] = location
        return location

    def _claim(self, place: Place) -> None:
        """Make a place free for other content, also of another object whose place it is too.

        A write of what lay there may be under way. Without the wait it could reach the disk after
        the next one, and the bytes of a dead object would be under the name of a living one.
        """
        if place in self._last_at:
            self._wait(self._last_at[place].writing)

    def _state_keys(self, segment: int) -> list[ObjectKey]:
        arrays = self._layouts.state[segment].arrays
        return [key for array in arrays for key in self._layouts.state_keys(segment, array.name)]
