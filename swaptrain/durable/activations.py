"""Keeps a step's activations on the disk as they are made, so that no kill repeats a forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import xxhash

from swaptrain.compute.slab_tensors import Slabs
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.memory.tier import Tier
from swaptrain.program.instructions import Kind, ObjectKey, Operation, Program
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.slots.commit import Write

__all__ = ["Activations"]

_VERIFYING_THREADS = 4


class Activations:
    """Writes what each forward makes to its place in the spill, and its checksum to the journal.

    Nothing is flushed: after a kill the kernel has all of it, after a power loss what does not
    verify is made again. A value that is written stays in memory as a clean copy, so that its
    eviction costs nothing more. One thread of its own writes, since what is written here is waited
    for (`wait`) and must not come after what is spilled and flushed.
    """

    def __init__(self, backing: DiskBacking, tier: Tier, io: DirectIO) -> None:
        self._backing, self._tier, self._io = backing, tier, io
        self._journal = backing.files.journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swaptrain-values")
        self._under_way: list[Future[None]] = []

    def save(self, keys: Iterable[ObjectKey], slabs: Slabs, step: int) -> None:
        """Begin to write what a forward made."""
        for key in keys:
            write, place = self._backing.value_write(key, slabs[key])
            future = self._thread.submit(self._write, write, place, step)
            self._backing.writing(key, future)
            self._tier.saving([key], future)
            self._under_way.append(future)

    def wait(self) -> None:
        """Wait until everything that was saved is written; the tier raises the errors."""
        if self._under_way:
            with self._tier.counters.waiting("wait for values"):
                wait(self._under_way)
            self._under_way.clear()

    def forget(self) -> None:
        """Let the next process make all of it anew; raises RunError."""
        wait(self._under_way)
        self._journal.clear()

    def found(self, step: int, candidates: Iterable[ObjectKey]) -> dict[ObjectKey, list[int]]:
        """Return those of the candidates that the disk holds as `step` made them.

        Reads and verifies them, at the disk's speed, and returns their checksums.
        """
        entries = self._journal.read(step)
        known: dict[ObjectKey, int] = {}
        for key in candidates:
            place = self._backing.places.in_journal(key)
            if place in entries:
                known[key] = entries[place]
        with ThreadPoolExecutor(_VERIFYING_THREADS) as threads:
            verified = threads.map(lambda item: self._verified(*item), known.items())
            return {
                key: sums for key, sums in zip(known, verified, strict=True) if sums is not None
            }

    def adopt(self, found: Mapping[ObjectKey, Sequence[int]], program: Program) -> None:
        """Let the program read what was found, as far as it does not make it anew."""
        read = {key for instruction in program for key in instruction.reads}
        made = {key for instruction in program for key in instruction.writes}
        forwarded = {i.segment for i in program if i.operation is Operation.FORWARD}
        for key, checksums in found.items():
            if key.kind is Kind.STATE:
                useful = key.segment not in forwarded
            else:
                useful = key in read and key not in made
            if useful:
                # First, since it would let go of what was found: an evaluation may have read the
                # buffers as they were.
                self._tier.free(key)
                self._backing.found_spilled(key, checksums)

    def close(self) -> None:
        """Finish what was begun and end the thread; errors stay in the futures."""
        self._thread.shutdown()
        self._journal.close()

    def _write(self, write: Write, place: int, step: int) -> None:
        sums = write.array.write_now(self._io, write.buffer, row=write.row)
        self._backing.note_checksums(write.array.place(write.row), sums)
        self._journal.write(place, step, _combined(sums))

    def _verified(self, key: ObjectKey, expected: int) -> list[int] | None:
        files, row = self._backing.saved_place(key)
        try:
            sums = files.checksums(row)
        except OSError:
            return None  # a file that cannot be read holds nothing that could be used
        return sums if _combined(sums) == expected else None


def _combined(checksums: Iterable[int]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(number.to_bytes(8, "little") for number in checksums))
