"""Which operations treat each row by itself, and what they are on rows laid out as a matrix.

A row value has the shape [..., C], and as many rows as its part of the graph has tokens: N. In the
body of a region each is a matrix, [n, C], of any n rows. A whole value, such as a weight, is the
same for all rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from swaptrain.capture.trace import Trace, is_random

__all__ = ["RowOperations", "is_product"]

_aten = torch.ops.aten
_PRODUCTS: Mapping[object, int] = {
    _aten.linear.default: 0,
    _aten.matmul.default: 0,
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
}
"""Products with a matrix, and the position of the rows among the arguments."""
_NORMS = (_aten.layer_norm.default, _aten.rms_norm.default)
_REDUCTIONS = (_aten.mean.dim, _aten.sum.dim_IntList, _aten.amax.default)
_SAME_ROWS = (
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default),
    *(_aten.contiguous.default, _aten.alias.default, _aten.clone.default),
    *(_aten.flatten.using_ints, _aten.unsqueeze.default, _aten.squeeze.dim),
)
"""What leaves a matrix of rows as it is where the last dimension stays the last."""
_OF_COLUMNS: Mapping[object, int] = {
    _aten.chunk.default: 2,
    _aten.split.Tensor: 2,
    _aten.split_with_sizes.default: 2,
    _aten.slice.Tensor: 1,
    _aten.cat.default: 1,
}
"""What divides or joins columns, and the position of the dimension among the arguments."""
_ELEMENTWISE = (_aten.type_as.default,)
"""Those that torch does not mark as such."""


class RowOperations:
    """Answers for N rows of a traced graph; nodes that write, or read what is written, are out."""

    def __init__(self, trace: Trace, count: int) -> None:
        self._trace, self.count = trace, count
        self._written = frozenset().union(*(facts.written for facts in trace.facts.values()))

    def has_rows(self, node: fx.Node) -> bool:
        """Whether a node makes nothing but row values."""
        tensors = self.tensors(node)
        return bool(tensors) and all(self._is_row(tensor) for tensor in tensors)

    def treats_rows(self, node: fx.Node) -> bool:
        """Whether an operation makes of each row what depends on this row and whole values."""
        if node.op != "call_function" or not self.has_rows(node) or is_random(node):
            return False
        if self._trace.facts[node].touched & self._written:
            return False
        return self._kept(node) or self._target_and_args(node) is not None

    def inputs(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the row values and the whole values that such an operation reads."""
        if node.target in _PRODUCTS:
            source = node.args[_PRODUCTS[node.target]]
            assert isinstance(source, fx.Node)
            return [source], [n for n in node.all_input_nodes if n is not source]
        rows = [n for n in node.all_input_nodes if self.has_rows(n)]
        return rows, [n for n in node.all_input_nodes if n not in rows]

    def copy(self, node: fx.Node, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Return what stands for the operation in a graph on matrices, [n, C]."""
        if self._kept(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return copies[source]
        found = self._target_and_args(node)
        assert found is not None, "treats_rows was asked"
        target, args = found
        args = fx.node.map_arg(args, copies.__getitem__)
        return graph.call_function(target, args, fx.node.map_arg(node.kwargs, copies.__getitem__))

    def _kept(self, node: fx.Node) -> bool:
        """Whether a matrix of rows would be the same after the operation."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.all_input_nodes != [source]:
            return False
        before, after = self.tensors(source), self.tensors(node)
        if len(before) != 1 or len(after) != 1 or not self._is_row(before[0]):
            return False
        if node.target is _aten.slice.Tensor:
            return before[0].shape == after[0].shape
        return node.target in _SAME_ROWS and before[0].shape[-1] == after[0].shape[-1]

    def _target_and_args(self, node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """Return the operation on matrices; None where rows are not by themselves."""
        target: Any = node.target
        args = list(node.args)
        if target in _PRODUCTS:
            return (target, node.args) if self._is_product(node) else None
        if target is operator.getitem:
            source = args[0]
            known = isinstance(source, fx.Node) and source.target in _OF_COLUMNS
            return (target, node.args) if known else None
        if target in _NORMS:
            whole = [n for n in node.all_input_nodes if n is not args[0]]
            shape = args[1] if len(args) > 1 else None
            one = isinstance(shape, list | tuple) and len(shape) == 1
            return (target, node.args) if one and all(self._is_whole(n) for n in whole) else None
        if target in _REDUCTIONS:
            dims = args[1] if len(args) > 2 and args[2] is True else None
            if not isinstance(dims, list | tuple):
                return None
            if [self._from_end(args[0], dim) for dim in dims] != [-1]:
                return None
            return target, (args[0], [-1], *args[2:])
        if target in _OF_COLUMNS:
            at = _OF_COLUMNS[target]
            first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            alike = all(self._alike(n, node) for n in node.all_input_nodes)
            if len(args) <= at or self._from_end(first, args[at]) != -1 or not alike:
                return None
            args[at] = -1
            return target, tuple(args)
        if target is _aten.to.dtype:
            return (target, node.args) if len(args) == 2 and not node.kwargs else None
        pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) or target in _ELEMENTWISE
        schema = getattr(target, "_schema", None)
        if not pointwise or schema is None or schema.is_mutable or "device" in node.kwargs:
            return None
        fit = (self._alike(n, node) or self._is_whole(n) for n in node.all_input_nodes)
        return (target, node.args) if all(fit) else None

    def _is_product(self, node: fx.Node) -> bool:
        rows, whole = self.inputs(node)
        if node.kwargs or not self.has_rows(rows[0]) or not all(map(self.tensors, whole)):
            return False
        return sorted(self.tensors(n)[0].dim() for n in whole) in ([2], [1, 2])

    def tensors(self, node: fx.Node) -> tuple[Tensor, ...]:
        """Return what a node makes, fake."""
        facts = self._trace.facts.get(node)
        return () if facts is None else facts.tensors

    def _is_row(self, tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and prod(tensor.shape[:-1]) == self.count

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether a value is broadcast to all rows, also of a matrix."""
        tensors = self.tensors(node)
        if len(tensors) != 1:
            return False
        shape = tensors[0].shape
        return len(shape) <= 1 or (len(shape) == 2 and shape[0] == 1 and self.count > 1)

    def _alike(self, node: fx.Node, result: fx.Node) -> bool:
        """Whether a value has a row for each row of the result, in the same places."""
        tensors, made = self.tensors(node), self.tensors(result)
        if len(tensors) != 1 or not self._is_row(tensors[0]):
            return False
        return _leading(tensors[0]) == _leading(made[0])

    def _from_end(self, source: Any, dim: Any) -> int | None:
        """Return a dimension of a value, counted from the end."""
        if not isinstance(source, fx.Node) or not isinstance(dim, int):
            return None
        tensors = self.tensors(source)
        return dim if dim < 0 or not tensors else dim - tensors[0].dim()


def is_product(node: fx.Node) -> bool:
    """Whether a node that treats rows multiplies them with a matrix."""
    return node.target in _PRODUCTS


def _leading(tensor: Tensor) -> list[int]:
    """Return the dimensions before the last, without those of 1 that broadcasting adds."""
    shape = list(tensor.shape[:-1])
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape
