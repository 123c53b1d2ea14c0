"""What the record of a slot says: its keys in one place, for those who write and read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swaptrain.errors import DamagedStoreError
from swaptrain.store.format.checks import check_kept
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.record import read_record

__all__ = ["blank_checksums", "read_kept", "state_record"]


def state_record(
    *,
    segment: int,
    version: int,
    fingerprint: str,
    layout: SegmentLayout,
    checksums: Mapping[str, Sequence[int]],
    handoff: Mapping[str, Any] | None = None,
    losses: Sequence[float] | None = None,
    norms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the attributes of a slot's record.

    `version` is the step after which the state is as it is; `checksums` has, by array, the xxh3-64
    of each chunk; `handoff`, `losses` and `norms` are what else the step needs to go on from here.
    """
    return {
        "segment": segment,
        "version": version,
        "fingerprint": fingerprint,
        "checksums": {name: list(values) for name, values in checksums.items()},
        "handoff": dict(handoff) if handoff is not None else {},
        "losses": list(losses) if losses is not None else [],
        "norms": dict(norms) if norms is not None else {},
        "table": layout.table(),
    }


def blank_checksums(layout: SegmentLayout) -> dict[str, list[int]]:
    """Return checksums of the longest text, from which `record_size` finds the bytes to reserve."""
    return {array.name: [2**64 - 1] * array.chunks for array in layout.arrays}


def read_kept(path: Path, segment: int) -> dict[str, Any]:
    """Return the record of what is kept of a segment beside its slot (`durable/commits.py`).

    Raises DamagedStoreError when it is missing, torn, another segment's, or says what no such
    record can say.
    """
    record = read_record(path)
    check_kept(record, path)
    if record["segment"] != segment:
        text = f"the record of what is kept of a segment is one of segment {record['segment']}"
        raise DamagedStoreError(text, segment=segment, path=path)
    return record
