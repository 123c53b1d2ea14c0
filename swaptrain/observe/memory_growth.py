"""Finds what takes more memory from step to step: a leak."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swaptrain.units import format_size

__all__ = ["Growth", "MemoryGrowth"]

_HOLDERS = ("weights", "state", "gradients", "values", "saved")
"""Of the pool. What the cache and staging hold is bounded by the pool, which it fills."""
_OUTSIDE, _ALLOCATED = "outside", "torch"
_STEPS = 16
"""Over which a growth must be steady: four stretches of four steps."""
_STRETCHES = 4
_CLOSE = 4
"""Steps that are looked at closely once something outside is seen to grow."""
_LEAST_BYTES = 64 << 10
"""A step: what a step adds to caches of Python and torch is less."""


class _Weighed(Protocol):
    """What was held after an instruction."""

    @property
    def operation(self) -> str: ...
    @property
    def segment(self) -> int: ...
    @property
    def held(self) -> tuple[int, ...]: ...
    @property
    def allocated_bytes(self) -> int | None: ...
    @property
    def outside_bytes(self) -> int: ...


@dataclass(frozen=True)
class Growth:
    """Something that takes more memory in each step."""

    step: int
    """The step after which it was found."""
    operation: str
    """The last one of the segment in a step: after it the segment holds more than before."""
    segment: int
    holder: str
    """One of the holders of memory.json; `torch`: its allocator; `outside`: nothing of these."""
    bytes_per_step: int
    of_torch: int = 0
    """Bytes of those, of what is outside, that torch's allocator has."""

    def text(self) -> str:
        """Return what a person is told."""
        place = f"at {self.operation.upper()} of segment {self.segment}"
        if not self.segment:
            place = f"at {self.operation.upper()}"
        grows = f"by {format_size(self.bytes_per_step)} a step {place}"
        over = f"over the last {_STEPS} steps"
        if self.holder == _ALLOCATED:
            return f"torch's allocator holds more {grows}, {over}: something keeps tensors"
        if self.holder != _OUTSIDE:
            return f"what is held as {self.holder} grows {grows}, {over}"
        kept = ": something keeps objects, or the heap falls to pieces"
        if self.of_torch:
            kept = f", of which {format_size(self.of_torch)} are in use in the allocator: something"
            kept += " keeps tensors"
        return f"the resident set grows {grows}, {over}, held by nothing of swaptrain's{kept}"

    def tree(self) -> dict[str, Any]:
        """Return it as memory.json has it."""
        return {
            "step": self.step,
            "operation": self.operation.upper(),
            "segment": self.segment,
            "holder": self.holder,
            "bytes_per_step": self.bytes_per_step,
            "steps": _STEPS,
        }


class MemoryGrowth:
    """Compares steps, instruction kind by instruction kind, and names each growth once.

    A growth is steady where the medians of four stretches of four steps rise by nearly the same,
    and by more than the steps of a stretch differ. A heap that comes to its size, or a cache that
    fills, rises less and less.
    """

    def __init__(self, *, least_bytes: int = 0) -> None:
        """Find what grows by `least_bytes` a step or more, and not less than 64 KiB."""
        self._least_bytes = max(least_bytes, _LEAST_BYTES)
        self._places: dict[tuple[str, int], int] = {}
        """Kinds of instructions, and their rows in the arrays."""
        self._held: deque[NDArray[np.int64]] = deque(maxlen=_STEPS)
        """Of each step the most that each kind saw: [kinds, holders]; -1 where it did not run."""
        self._first: deque[int] = deque(maxlen=_STEPS)
        """Of each step what was allocated at its first instruction."""
        self._net: deque[NDArray[np.int64]] = deque(maxlen=_CLOSE)
        """What a step's instructions of a segment left behind: [segments, outside and torch]."""
        self._steps = 0
        self.looks_closely = False
        """Whether the allocator is to be asked at each instruction."""
        self._last: dict[int, str] = {}
        """The last operation of each segment in a step."""
        self._before: tuple[int, int] | None = None
        self.found: list[Growth] = []

    def add(self, step: int, rows: Sequence[_Weighed]) -> list[Growth]:
        """Take a step's rows, and return what is found to grow for the first time."""
        if not rows:
            return []
        self._note_held(rows)
        if self.looks_closely:
            self._note_net(rows)
        self._steps += 1
        if len(self._held) < _STEPS or self._steps % _CLOSE:
            return []
        named = {found.holder for found in self.found}
        found = [one for one in self._grown(step) if one.holder not in named]
        self.found += found
        return found

    def _note_held(self, rows: Sequence[_Weighed]) -> None:
        most: dict[int, tuple[int, ...]] = {}
        for row in rows:
            kind = (row.operation, row.segment)
            place = self._places.setdefault(kind, len(self._places))
            known = most.get(place)
            held = (*row.held[: len(_HOLDERS)], row.outside_bytes)
            most[place] = held if known is None else tuple(map(max, known, held))
        table = np.full((len(self._places), len(_HOLDERS) + 1), -1, np.int64)
        for place, held in most.items():
            table[place] = held
        self._held.append(table)
        self._first.append(rows[0].allocated_bytes or 0)

    def _note_net(self, rows: Sequence[_Weighed]) -> None:
        """Add up by segment what is outside, and allocated, more than one instruction before."""
        left = np.zeros((max(row.segment for row in rows) + 1, 2), np.int64)
        outside, allocated = self._before or (rows[0].outside_bytes, rows[0].allocated_bytes or 0)
        for row in rows:
            now = row.outside_bytes, row.allocated_bytes or 0
            left[row.segment] += (now[0] - outside, now[1] - allocated)
            outside, allocated = now
            self._last[row.segment] = row.operation
        self._before = outside, allocated
        self._net.append(left)

    def _grown(self, step: int) -> Iterator[Growth]:
        kinds = min(len(table) for table in self._held)
        series = np.stack([table[:kinds] for table in self._held])  # [steps, kinds, holders]
        rates = self._rates(series)
        of_kind = list(self._places)
        for number, holder in enumerate(_HOLDERS):
            place = int(rates[:, number].argmax())
            if rates[place, number] > 0:
                operation, segment = of_kind[place]
                yield Growth(step, operation, segment, holder, int(rates[place, number]))
        # Each instruction after a leak sees it: it grows where most do.
        outside = int(np.median(rates[:, -1]))
        allocated = int(self._rates(np.array(self._first).reshape(_STEPS, 1, 1))[0, 0])
        grows = outside > 0 or allocated > 0
        if grows and len(self._net) == _CLOSE:
            segment = self._segment(1 if allocated > 0 else 0)
            operation = self._last[segment]
            if outside > 0:
                yield Growth(step, operation, segment, _OUTSIDE, outside, allocated)
            else:
                yield Growth(step, operation, segment, _ALLOCATED, allocated)
        self._look_closely(grows and not {_OUTSIDE, _ALLOCATED} & {f.holder for f in self.found})

    def _look_closely(self, wanted: bool) -> None:
        """Have the next steps looked at closely, or no more."""
        if wanted != self.looks_closely:
            self._net.clear()
            self._before = None
        self.looks_closely = wanted

    def _segment(self, column: int) -> int:
        """Return the segment whose instructions left most behind."""
        segments = min(len(left) for left in self._net)
        net = np.stack([left[:segments, column] for left in self._net])
        return int(net.mean(axis=0).argmax())

    def _rates(self, series: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return bytes a step where the growth is steady, else 0: [kinds, holders]."""
        size = _STEPS // _STRETCHES
        stretches = series.reshape(_STRETCHES, size, *series.shape[1:])
        medians = np.median(stretches, axis=1)
        rises = np.diff(medians, axis=0)
        least, most = rises.min(axis=0), rises.max(axis=0)
        rate = (medians[-1] - medians[0]) / (size * (_STRETCHES - 1))
        line = rate * (np.arange(size) - (size - 1) / 2).reshape(-1, 1, 1)
        noise = np.median(np.abs(stretches - medians[:, None] - line[None]), axis=(0, 1))
        steady = (least >= most / 2) & (least > 2 * noise) & (rate >= self._least_bytes)
        ran = series.min(axis=0) >= 0
        found: NDArray[np.float64] = np.where(steady & ran, rate, 0.0)
        return found
