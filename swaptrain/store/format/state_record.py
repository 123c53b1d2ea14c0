"""The records of a segment: of a slot, and of a finished gradient beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, Field, model_validator

from swaptrain.errors import DamagedStoreError
from swaptrain.program.instructions import Kind, ObjectKey, Of
from swaptrain.program.roles import SCALE_ELEMENTS, Role, role_of, state_array, state_of
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.schema import (
    MOST_ELEMENTS,
    ArrayName,
    AtLeastOne,
    Checksum,
    Dtype,
    Items,
    JsonNumber,
    Name,
    Record,
    Sizes,
    Whole,
)
from swaptrain.units import how_many

__all__ = ["HandoffRow", "SegmentRecord", "SlotRecord", "TableRow"]
__all__ += ["blank_checksums", "finished_record", "handoff_row", "read_finished", "state_record"]


def _norm(found: float) -> float:
    if found < 0:  # of NaN, which a gradient may have, this is false
        raise ValueError("a norm is not negative")
    return found


class TableRow(Record):
    """Place of a tensor in an array of its segment; offset and strides in elements."""

    name: Name
    shape: Sizes
    stride: Sizes
    dtype: Dtype
    array: ArrayName
    offset: Annotated[int, Field(ge=0, le=MOST_ELEMENTS)]

    @property
    def extent(self) -> int:
        """Elements of memory from the first to the last element."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


class HandoffRow(Record):
    """A gradient that a commit handed on: where it lies, and its checksums."""

    name: Name
    of: Literal["", "parameter"] = ""
    """What it is the gradient of: a value, or a parameter that several segments read."""
    segment: AtLeastOne
    micro_batch: Whole
    row: Whole | None = None
    checksums: Items[Checksum]

    @property
    def key(self) -> ObjectKey:
        """The gradient that it is of."""
        return ObjectKey(Kind.GRADIENT, self.name, self.segment, self.micro_batch, of=Of(self.of))


class _Handoff(Record):
    gradients: Items[HandoffRow] = ()


def _loss_scale(found: Sequence[float]) -> Sequence[float]:
    if found and (len(found) != 3 or not found[0] > 0 or any(n < 0 or n % 1 for n in found[1:])):
        raise ValueError("no scale of a loss")
    return found


class SegmentRecord(Record):
    """Record of a segment; as it is, that of a finished gradient, with the buffers beside it."""

    title: ClassVar[str] = "a record"
    segment: AtLeastOne
    version: Whole
    """The step after which the bytes are as they are."""
    fingerprint: Name
    checksums: dict[ArrayName, Items[Checksum]]
    """Xxh3-64 of each chunk, by array."""
    handoff: _Handoff
    losses: Items[JsonNumber]
    """Of the step's micro-batches, as far as they are known."""
    norms: dict[Name, Annotated[JsonNumber, AfterValidator(_norm)]]
    """Of the gradient of each parameter."""
    scale: Annotated[Items[JsonNumber], AfterValidator(_loss_scale)] = ()
    """Of the step's loss in float16: the scale, steps since it is so, and updates that were skipped
    before the step."""


class SlotRecord(SegmentRecord):
    """Record of a slot, with the table of what lies in it."""

    table: Items[TableRow]
    metadata: dict[ArrayName, Checksum] = Field(default_factory=dict)
    """Xxh3-64 of the zarr.json of each array."""

    @model_validator(mode="after")
    def _fits_itself(self) -> Self:
        for row in self.table:
            sizes, strides = len(row.shape), len(row.stride)
            if sizes != strides:
                raise ValueError(
                    f"{row.name} has {how_many(sizes, 'size')} and {how_many(strides, 'stride')}"
                )
            if row.array not in self.checksums:
                raise ValueError(f"{row.name} lies in an array that has no checksums")
        by_place = {(row.name, row.array): row for row in self.table}
        weights = {row.name: row for row in self.table if role_of(row.array) is Role.WEIGHTS}
        for row in self.table:
            _check_completes(row, weights.get(row.name))
            _check_codes(row, by_place)
        return self

    def check_fit(self, arrays: Mapping[str, Shaped], path: Path) -> None:
        """Raise DamagedStoreError unless arrays and tensors fit the arrays that are on the disk.

        Each chunk has a checksum; each tensor lies inside its array, and no two tensors overlap.
        """

        def bad(text: str, array: str) -> DamagedStoreError:
            return DamagedStoreError(text, segment=self.segment, array=array, path=path)

        for name, sums in self.checksums.items():
            found = arrays.get(name)
            if found is None:
                raise bad("an array is missing", name)
            if len(sums) != found.chunks or found.rows is not None:
                sums_found = how_many(len(sums), "checksum")
                text = f"an array has {how_many(found.chunks, 'chunk')}, its record {sums_found}"
                raise bad(text, name)
        spans: dict[str, list[tuple[int, int, str]]] = {}
        for row in self.table:
            found, end = arrays[row.array], row.offset + row.extent
            if row.dtype != found.dtype or prod(row.shape) > max(row.extent, 0):
                what = f"{row.name}, {row.dtype} of {list(row.shape)}, is not laid out as it can be"
                raise bad(what, row.array)
            if end * ITEMSIZE[found.dtype] > found.chunk_bytes * found.chunks:
                raise bad(f"{row.name} ends after its array", row.array)
            spans.setdefault(row.array, []).append((row.offset, end, row.name))
        for name, places in spans.items():
            for (_, end, before), (start, _, after) in pairwise(sorted(places)):
                if start < end or before == after:
                    raise bad(f"{before} and {after} overlap", name)


def _check_completes(row: TableRow, weight: TableRow | None) -> None:
    """Raise ValueError where a row completes a weight to its master, and is not laid out as it."""
    if role_of(row.array) is not Role.REMAINDER:
        return
    dtypes = {"bfloat16": "uint16", "float16": "float32"}
    if weight is None or (row.shape, row.stride, row.dtype) != (
        weight.shape,
        weight.stride,
        dtypes.get(weight.dtype),
    ):
        raise ValueError(f"{row.name} in {row.array} is not the rest of a weight beside it")


def _check_codes(row: TableRow, by_place: Mapping[tuple[str, str], TableRow]) -> None:
    """Raise ValueError where a row holds codes that do not fill their memory or lack scales."""
    if role_of(row.array) is not Role.OPTIMIZER:
        return
    state, form = state_of(row.array)
    if form != "8bit":
        return
    scales = by_place.get((row.name, state_array(state, "scale")))
    numel = prod(row.shape)
    if row.dtype != "uint8" or row.extent != numel:
        raise ValueError(f"{row.name} in {row.array} does not lie as codes do")
    count = -(-numel // SCALE_ELEMENTS)
    expected = (count,), (1,), "float32"
    if scales is None or (scales.shape, scales.stride, scales.dtype) != expected:
        raise ValueError(
            f"{row.name} has codes in {row.array} and not their {how_many(count, 'scale')}"
        )


class Shaped(Protocol):
    """Anything that has the fields of an ArrayShape."""

    @property
    def dtype(self) -> str: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def rows(self) -> int | None: ...


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
    scale: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the attributes of a slot's record, as `SlotRecord` has them.

    `checksums` has, by array, the xxh3-64 of each chunk.
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
        **({} if scale is None else {"scale": [*scale]}),
    }


def handoff_row(key: ObjectKey, checksums: Sequence[int], row: int | None) -> dict[str, Any]:
    """Return a gradient of a hand-off, in that row of its array, as a `HandoffRow` has it."""
    return {
        "name": key.name,
        **({} if key.of is Of.PLAIN else {"of": key.of.value}),
        "segment": key.segment,
        "micro_batch": key.micro_batch,
        "row": row,
        "checksums": list(checksums),
    }


def blank_checksums(layout: SegmentLayout) -> dict[str, list[int]]:
    """Return checksums of the longest text, from which `record_size` finds the bytes to reserve."""
    return {array.name: [2**64 - 1] * array.chunks for array in layout.arrays}


def finished_record(
    *,
    segment: int,
    version: int,
    fingerprint: str,
    checksums: Mapping[str, Sequence[int]],
    handoff: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
    norms: Mapping[str, float],
    scale: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the record of a step's finished gradient, and of the buffers that belong to it."""
    return {
        "segment": segment,
        "version": version,
        "fingerprint": fingerprint,
        "checksums": {name: list(values) for name, values in checksums.items()},
        "losses": list(losses),
        "norms": dict(norms),
        "handoff": {"gradients": list(handoff)},
        **({} if scale is None else {"scale": [*scale]}),
    }


def read_finished(path: Path, segment: int) -> SegmentRecord:
    """Return the record of a segment's finished gradient.

    Raises DamagedStoreError when it is missing, torn, another segment's, or says what no such
    record can say.
    """
    record = SegmentRecord.read(path)
    if record.segment != segment:
        text = f"the record of a finished gradient is one of segment {record.segment}"
        raise DamagedStoreError(text, segment=segment, path=path)
    return record
