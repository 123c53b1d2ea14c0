"""Reads whole slots, chunk by chunk past the page cache: to verify them, and to copy them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swaptrain.errors import DamagedStoreError, Where
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.store.format.state_record import SlotRecord
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.store.slots.slot import Slot
from swaptrain.units import how_many

__all__ = ["copy_slot", "verify_slot"]


def verify_slot(slot: Slot, io: DirectIO, *, segment: int, version: int) -> None:
    """Raise DamagedStoreError unless a slot holds `version` of the segment, whole."""
    record = _read_record(slot, segment, version)
    for name, sums in record.checksums.items():
        for _ in _read(slot.array(name), sums, io, segment):
            pass


def copy_slot(source: Slot, target: Slot, io: DirectIO, *, segment: int, version: int) -> None:
    """Write what a slot holds into another one of its shape class, flushed, record last.

    The bytes are written again, not shared by the file system: two copies on the disk. Raises
    DamagedStoreError when the source does not verify, RunError.
    """
    record = _read_record(source, segment, version)
    for name, sums in record.checksums.items():
        files = target.array(name).files()
        for first, blocks in _read(source.array(name), sums, io, segment):
            futures = [
                io.write(files[first + i], block, flush=True, checksum=False)
                for i, block in enumerate(blocks)
            ]
            for future in futures:
                future.result()
    target.write_record(record.attributes())


def _read_record(slot: Slot, segment: int, version: int) -> SlotRecord:
    try:
        record = slot.read_record(segment)
    except DamagedStoreError as error:
        raise error.within(Where(segment)) from error
    if record.version != version:
        text = f"a slot should hold step {version} and holds step {record.version}"
        raise DamagedStoreError(text, segment=segment, path=slot.path)
    return record


def _read(
    array: ArrayFiles, sums: Sequence[int], io: DirectIO, segment: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield the chunks of an array, verified, as many at a time as there are threads.

    Each time with the number of the first one; the memory is used again for the next ones. So it
    never takes more than the array, which an instruction holds in memory as well.
    """
    files = array.files()
    if len(sums) != len(files):
        raise DamagedStoreError(
            f"a record has {how_many(len(sums), 'checksum')} for {how_many(len(files), 'chunk')}",
            segment=segment,
            array=array.name,
        )
    many, size = min(io.threads, len(files)), array.chunk_bytes
    memory = io_buffer(many * size)
    blocks = [memory[size * i : size * (i + 1)] for i in range(many)]
    for first in range(0, len(files), many):
        futures = [
            io.read(
                files[number],
                blocks[number - first],
                checksum=sums[number],
                where=Where(segment, array.name, number),
            )
            for number in range(first, min(first + many, len(files)))
        ]
        for future in futures:
            future.result()
        yield first, blocks[: len(futures)]
