"""Cross entropy over a few rows at a time, with the bits of torch's own over all of them.

Of N rows of logits over C classes torch makes a float32 copy, the logarithms of their softmax, and
two gradients of that size, each in memory as a whole: with a vocabulary of 128 thousand a gigabyte
for 512 tokens. What one row adds depends on no other row. So the same kernels are called for as
many rows as a processor's cache holds, and only the logits themselves and their gradient exist
whole. The rows' mean is torch's own reduction, of what each row adds to it. The bits were compared
on CPUs; a GPU's kernels may add a row in another order where it begins at another alignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from swaptrain.capture.trace import resolve_attribute
from swaptrain.capture.trained_rows import find_head

__all__ = ["cross_entropy", "replace_cross_entropy"]

_aten = torch.ops.aten
PIECE_BYTES = 2 << 20
"""Of the softmax of the rows that are computed with at once, on a processor with caches."""
_DEVICE_PIECE_BYTES = 64 << 20
"""The same on other devices, where launching a kernel costs."""
_NONE, _MEAN, _SUM = 0, 1, 2
"""torch's numbers of the reductions."""
_LEFT_OUT = -1
"""Stands for every ignored target where the rows' losses are reduced."""
_VIEWS = (_aten.view.default, _aten.reshape.default)


def replace_cross_entropy(
    graph: fx.Graph, owner: torch.nn.Module, *, skip_ignored: bool = False
) -> None:
    """Let a segment's graph compute its cross entropies by rows, in place.

    `owner` holds the bodies of its higher-order operations. With `skip_ignored` a head is computed
    for the rows alone that are not ignored, where it has one reader.

    Those whose targets are class numbers and whose loss is the mean or the sum of rows that count
    alike. A cast of the logits that nothing else reads becomes part of it. A graph that writes to
    tensors stays as it is: logits are read later than they were, and again in the backward.
    """
    if any(_writes(node, owner) for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _aten.cross_entropy_loss.default:
            continue
        given = _arguments(node)
        logits, targets = given["self"], given["target"]
        if not _is_usual(given):
            continue
        cast = _value(logits)
        source, passed = _before_cast(logits, node)
        reader = passed[-1] if passed else node
        head = find_head(source, reader) if skip_ignored else None
        count = cast.shape[0]
        with graph.inserting_before(node):
            if head is not None:
                source, targets = head.apply(graph, targets, given["ignore_index"])
                count = None
            by_rows = graph.call_function(
                cross_entropy,
                (source, targets, given["reduction"], given["ignore_index"]),
                {"shape": (count, cast.shape[1]), "dtype": cast.dtype},
            )
        by_rows.meta.update(node.meta)
        node.replace_all_uses_with(by_rows)
        for unused in (node, *passed):
            graph.erase_node(unused)
        if head is not None:
            head.erase(graph)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    reduction: int,
    ignore_index: int,
    *,
    shape: tuple[int | None, int],
    dtype: torch.dtype,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy(logits.to(dtype).view(shape), targets)`.

    `shape` is (N, C), with None for as many as there are targets; `targets` are (N,) of int64;
    `reduction` is torch's number of mean or sum.
    Raises IndexError for a target that is no class, as torch does.
    """
    count, classes = len(targets) if shape[0] is None else shape[0], shape[1]
    logits = logits.reshape(count, classes)
    limit_bytes = PIECE_BYTES if logits.device.type == "cpu" else _DEVICE_PIECE_BYTES
    rows = max(1, limit_bytes // (classes * dtype.itemsize))
    if rows >= count:
        given = (logits.to(dtype), targets, None, reduction, ignore_index)
        whole: Tensor = _aten.cross_entropy_loss(*given)
        return whole
    # torch gives `apply` no types.
    loss: Tensor = _ByRows.apply(logits, targets, reduction, ignore_index, dtype, rows)  # type: ignore[no-untyped-call]
    return loss


class _ByRows(torch.autograd.Function):
    """Keeps the logits as they came; what the forward made of them is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        reduction: int,
        ignore_index: int,
        dtype: torch.dtype,
        rows: int,
    ) -> Tensor:
        each = torch.zeros(len(logits), 1, dtype=dtype, device=logits.device)
        for some, logarithms in _logarithms(logits, targets, ignore_index, dtype, rows):
            lost, _ = _aten.nll_loss_forward(logarithms, targets[some], None, _NONE, ignore_index)
            each[some, 0] = -lost
        # The reduction reads one logarithm of each row: as if there were one class, 0. What marks
        # the rows to leave out must be another number, whatever the model's own ignore_index is.
        only = torch.where(targets == ignore_index, _LEFT_OUT, 0)
        loss: Tensor
        loss, weight = _aten.nll_loss_forward(each, only, None, reduction, _LEFT_OUT)
        ctx.save_for_backward(logits, targets, weight)
        ctx.settings = (reduction, ignore_index, dtype, rows)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, weight = ctx.saved_tensors
        reduction, ignore_index, dtype, rows = ctx.settings
        result = torch.zeros_like(logits)
        for some, logarithms in _logarithms(logits, targets, ignore_index, dtype, rows):
            inner = _aten.nll_loss_backward(
                gradient, logarithms, targets[some], None, reduction, ignore_index, weight
            )
            found = _aten._log_softmax_backward_data(inner, logarithms, 1, dtype)
            result[some] = found.to(result.dtype)
        return result, None, None, None, None, None


def _logarithms(
    logits: Tensor, targets: Tensor, ignore_index: int, dtype: torch.dtype, rows: int
) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """Yield the logarithms of the softmax of `rows` rows after the other, and which they are.

    Ignored rows are left out: they add nothing to the loss, and their gradient is 0. float16 alone
    reads them, since a logit that overflows there skips the step.
    """
    counted = torch.nonzero(targets != ignore_index)[:, 0]
    if len(counted) == len(logits) or logits.dtype == torch.float16:
        for first in range(0, len(logits), rows):
            some = slice(first, min(first + rows, len(logits)))
            yield some, torch.log_softmax(logits[some].to(dtype), 1)
        return
    for part in torch.split(counted, rows):
        yield part, torch.log_softmax(logits[part].to(dtype), 1)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operation by their names in its schema."""
    target: Any = node.target
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given.update(zip(given, node.args, strict=False))
    return given | node.kwargs


def _writes(node: fx.Node, owner: torch.nn.Module) -> bool:
    """Whether an operation, or one in the body of a region without gradients, says it writes."""
    if node.op == "get_attr":
        body = resolve_attribute(owner, str(node.target))
        return isinstance(body, fx.GraphModule) and any(_writes(n, body) for n in body.graph.nodes)
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _is_usual(given: dict[str, Any]) -> bool:
    if given["weight"] is not None or given["label_smoothing"] or given["reduction"] == _NONE:
        return False
    logits, targets = _value(given["self"]), _value(given["target"])
    return (
        isinstance(logits, Tensor)
        and isinstance(targets, Tensor)
        and logits.dim() == 2
        and logits.is_contiguous()
        and targets.dim() == 1
        and targets.dtype == torch.int64
        # With none of either torch has rules of its own.
        and logits.numel() > 0
    )


def _before_cast(logits: fx.Node, user: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return what is cast to become `logits`, and the nodes between, the last one first.

    Where nothing is cast, or something else reads the result too, that is `logits`, and none.
    """
    node, reader = logits, user
    passed: list[fx.Node] = []
    while node.op == "call_function" and set(node.users) == {reader}:
        passed.append(node)
        source = node.args[0]
        if node.target is _aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            assert isinstance(source, fx.Node)
            value = _value(source)
            if isinstance(value, Tensor) and value.is_floating_point() and value.is_contiguous():
                return source, passed
            break
        if node.target not in _VIEWS or not isinstance(source, fx.Node):
            break
        node, reader = source, node
    return logits, []


def _value(node: Any) -> Any:
    """Return the fake tensor that a node makes, as far as the export has left one."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None
