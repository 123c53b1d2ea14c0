"""Finds live slots whose record cannot be their own, at little cost where all are well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.store.check.claims import live_unit
from swaptrain.store.check.scan import WRONG_CHECKSUM, Chunk, Scanner
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import segments_directory

__all__ = ["doubted_records", "is_doubted", "untrue_record"]


def doubted_records(run_dir: Path) -> list[DamagedStoreError]:
    """Return what names the records of live slots that are true of none of their chunks.

    Such a record is whole, and so is each chunk, but they are of two steps. One chunk is read of a
    slot whose record is right.
    """
    links = segments_directory(run_dir).glob("*")
    segments = sorted(int(link.name) for link in links if link.name.isdecimal())
    found = []
    with DirectIO() as io, Scanner(io) as scanner:
        for unit in (live_unit(run_dir, k, None) for k in segments):
            problems: list[str] = []
            for chunk in unit.chunks:
                problem = scanner.problem(chunk)
                if problem is None:
                    break
                problems.append(problem)
            if is_doubted(unit.chunks, problems):
                found.append(untrue_record(unit.path, unit.segment, len(problems)))
    return found


def is_doubted(chunks: Sequence[Chunk], problems: Sequence[str]) -> bool:
    """Whether all of a slot's chunks are there and whole, and none has its record's checksum."""
    other_bytes = all(problem.startswith(WRONG_CHECKSUM) for problem in problems)
    return len(problems) == len(chunks) > 1 and other_bytes


def untrue_record(slot: Path, segment: int, count: int) -> DamagedStoreError:
    """Return the error that names the record of such a slot, which has `count` chunks."""
    text = (
        f"a record that is true of none of the {count} chunks of its slot: it may be of another "
        "step, or they were overwritten"
    )
    return DamagedStoreError(text, segment=segment, path=slot / "zarr.json")
