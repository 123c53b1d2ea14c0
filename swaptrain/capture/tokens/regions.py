"""Finds what of a captured graph treats each token by itself, such as an MLP with its norm.

A region grows from its output backwards, over operations that nothing else reads. It ends at the
first value, no wider than its output, that is all it reads of the rows: the residual stream, or the
hidden states before a norm. Attention, and whatever mixes rows, is never part of one. What makes
it worth its recomputation is a product inside that is wider than what it reads and returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, fx

from swaptrain.capture.tokens.operations import RowOperations, is_product
from swaptrain.capture.trace import Trace

__all__ = ["Region", "find_regions"]

_MOST_NODES = 400
_MOST_INPUTS = 3
"""Row values that a region reads: what is ranged over, residuals, what attention made."""
_WORTHWHILE = 2
"""How many times as much a region has to make inside as it reads and returns."""


@dataclass(frozen=True)
class Region:
    """Operations on N rows that make one value of a few."""

    nodes: tuple[fx.Node, ...]
    """In the order of the graph; the last one makes the output, [..., C]."""
    row_inputs: tuple[fx.Node, ...]
    """Values with a row for each token, [..., C]."""
    whole_inputs: tuple[fx.Node, ...]
    """Weights and other values that are the same for all rows."""
    rows: RowOperations

    @property
    def out(self) -> fx.Node:
        """The operation that makes the output."""
        return self.nodes[-1]

    def body(self) -> fx.Graph:
        """Return the operations on matrices: row inputs, [n, C], then whole ones; one output."""
        graph = fx.Graph()
        inputs = (*self.row_inputs, *self.whole_inputs)
        copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
        for node in self.nodes:
            copies[node] = self.rows.copy(node, graph, copies)
        graph.output(copies[self.out])
        return graph


def find_regions(
    graph: fx.Graph, trace: Trace, tokens: int, *, taken: Iterable[fx.Node] = ()
) -> list[Region]:
    """Return the regions of more than `tokens` rows, none of which shares an operation.

    `taken` are operations that belong to no region.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(nodes)}
    used = set(taken)
    counts: dict[int, RowOperations] = {}
    found: list[Region] = []
    for node in reversed(nodes):
        tensors = trace.facts[node].tensors
        if node in used or len(tensors) != 1 or tensors[0].dim() < 2:
            continue
        count = prod(tensors[0].shape[:-1])
        if count <= tokens or not tensors[0].is_contiguous():
            continue
        rows = counts.setdefault(count, RowOperations(trace, count))
        if rows.treats_rows(node):
            region = _Growth(node, rows, trace, place, used).region()
            if region is not None:
                used.update(region.nodes)
                found.append(region)
    return found[::-1]


class _Growth:
    """A region while it grows backwards from its output."""

    def __init__(
        self,
        out: fx.Node,
        rows: RowOperations,
        trace: Trace,
        place: dict[fx.Node, int],
        used: set[fx.Node],
    ) -> None:
        self._out, self._rows, self._trace = out, rows, trace
        self._place, self._used = place, used
        self._inside = {out}
        self._read = set(rows.inputs(out)[0])

    def region(self) -> Region | None:
        """Return the region; None where none is worth its recomputation."""
        while len(self._inside) < _MOST_NODES:
            if len(self._read) == 1:
                if not any(map(is_product, self._inside)):
                    return None  # what is read comes out of a region of its own
                (only,) = self._read
                if self._width(only) <= self._width(self._out) and self._is_worthwhile():
                    self._add_before(only)
                    break
            grows = next(self._growing(), None)
            if grows is None:
                break
            self._add(grows)
        return self._made() if self._is_worthwhile() else None

    def _growing(self) -> Iterator[fx.Node]:
        """Yield what is read and may be part of the region, the last one of the graph first."""
        for node in sorted(self._read, key=lambda n: -self._place.get(n, -1)):
            if self._may_join(node):
                yield node

    def _may_join(self, node: fx.Node) -> bool:
        alone = node not in self._used and set(node.users) <= self._inside
        return alone and self._rows.treats_rows(node)

    def _add(self, node: fx.Node) -> None:
        self._inside.add(node)
        self._read.discard(node)
        self._read.update(n for n in self._rows.inputs(node)[0] if n not in self._inside)

    def _add_before(self, node: fx.Node) -> None:
        """Add norms and the like that make what is read of one other value."""
        while self._may_join(node) and not is_product(node):
            reads = self._rows.inputs(node)[0]
            path = self._path(node)
            if len(reads) != 1 and path is None:
                return
            for each in path or [node]:
                self._add(each)
            if len(self._read) != 1:
                return
            (node,) = self._read

    def _path(self, node: fx.Node) -> list[fx.Node] | None:
        """Return the operations of a norm from its last one back to the one value that it reads."""
        inside, reads = [node], set(self._rows.inputs(node)[0])
        known = self._inside | {node}
        while len(reads) > 1:
            last = max(reads, key=lambda n: self._place.get(n, -1))
            joins = last not in self._used and set(last.users) <= known
            if not joins or is_product(last) or not self._rows.treats_rows(last):
                return None
            inside.append(last)
            known.add(last)
            reads.discard(last)
            reads.update(n for n in self._rows.inputs(last)[0] if n not in known)
        return inside

    def _is_worthwhile(self) -> bool:
        made = sum(self._trace.made_bytes(node) for node in self._inside - {self._out})
        moved = sum(map(self._width, self._read)) + self._width(self._out)
        enough = made >= _WORTHWHILE * moved * self._rows.count
        single = all(len(self._trace.facts[node].tensors) == 1 for node in self._read)
        few = 1 <= len(self._read) <= _MOST_INPUTS
        return enough and single and few and self._is_wide()

    def _is_wide(self) -> bool:
        """Whether a product inside has more columns than what is read and returned."""
        widest = max(map(self._columns, (*self._read, self._out)))
        return any(is_product(n) and self._columns(n) > widest for n in self._inside)

    def _columns(self, node: fx.Node) -> int:
        return sum(tensor.shape[-1] for tensor in self._trace.facts[node].tensors)

    def _width(self, node: fx.Node) -> int:
        """Return the bytes of a row."""
        return sum(_row_bytes(tensor) for tensor in self._trace.facts[node].tensors)

    def _made(self) -> Region:
        nodes = sorted(self._inside, key=self._place.__getitem__)
        row_inputs: dict[fx.Node, None] = {}
        whole: dict[fx.Node, None] = {}
        for node in nodes:
            reads, others = self._rows.inputs(node)
            row_inputs.update(dict.fromkeys(n for n in reads if n not in self._inside))
            whole.update(dict.fromkeys(others))
        return Region(tuple(nodes), tuple(row_inputs), tuple(whole), self._rows)


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[-1] * tensor.element_size()
