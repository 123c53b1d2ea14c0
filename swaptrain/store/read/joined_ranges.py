"""Parameters whose ranges of rows are stored by themselves, read as one tensor again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from swaptrain.errors import DamagedStoreError
from swaptrain.program.row_ranges import WHOLE, RowRange, range_of
from swaptrain.store.format.root import RootRecord
from swaptrain.store.read.safetensors import StreamedTensor

__all__ = ["joined_ranges"]


@dataclass(frozen=True)
class _Chain:
    """Pieces of several tensors, one after the other, that can be read again."""

    tensors: tuple[StreamedTensor, ...]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for tensor in self.tensors:
            yield from tensor.pieces


def joined_ranges(tensors: Iterable[StreamedTensor], root: RootRecord) -> Iterator[StreamedTensor]:
    """Yield tensors, those of ranges of rows as the whole ones that they are of.

    A name may end after that of a range, as `w[0:8].exp_avg`. What an optimizer holds in one
    number is the same for all ranges of a parameter, and comes once. Raises DamagedStoreError where
    a range that the `root` names is missing.
    """
    if root.choices.ranges == WHOLE:
        yield from tensors
        return
    named = (name for row in root.segments for name in row.parameters)
    ranges = {name: own for name in named if (own := range_of(name)) is not None}
    counts: dict[str, int] = {}
    for own in ranges.values():
        counts[own.whole] = counts.get(own.whole, 0) + 1
    waiting: dict[tuple[str, str], list[tuple[RowRange, StreamedTensor]]] = {}
    for tensor in tensors:
        before, bracket, behind = tensor.name.rpartition("]")
        found = ranges.get(before + bracket)
        if found is None:
            yield tensor
            continue
        parts = waiting.setdefault((found.whole, behind), [])
        parts.append((found, tensor))
        if len(parts) == counts[found.whole]:
            yield _joined(found.whole + behind, waiting.pop((found.whole, behind)))
    for whole, behind in waiting:
        raise DamagedStoreError(f"a range of {whole}{behind} is missing")


def _joined(name: str, parts: list[tuple[RowRange, StreamedTensor]]) -> StreamedTensor:
    parts.sort(key=lambda part: part[0].first)
    if not any(tensor.shape for _, tensor in parts):
        return replace(parts[0][1], name=name)
    end = 0
    for own, tensor in parts:
        if own.first != end or own.end <= end or tensor.shape[:1] != (own.count,):
            raise DamagedStoreError(f"the ranges of {name} are not all of it")
        end = own.end
    ordered = tuple(tensor for _, tensor in parts)
    first = ordered[0]
    if any((t.dtype, t.shape[1:]) != (first.dtype, first.shape[1:]) for t in ordered):
        raise DamagedStoreError(f"the ranges of {name} differ in kind or shape")
    nbytes = sum(tensor.nbytes for tensor in ordered)
    return StreamedTensor(name, first.dtype, (end, *first.shape[1:]), nbytes, _Chain(ordered))
