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
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["cross_entropy", "note_rows", "of_logits", "reduced", "rows_at_once"]

_aten = torch.ops.aten
PIECE_BYTES = 2 << 20
"""Of the softmax of the rows that are computed with at once, on a processor with caches."""
_DEVICE_PIECE_BYTES = 64 << 20
"""The same on other devices, where launching a kernel costs."""
_NONE, _MEAN, _SUM = 0, 1, 2
"""torch's numbers of the reductions."""
_LEFT_OUT = -1
"""Stands for every ignored target where the rows' losses are reduced."""


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
    rows = rows_at_once(classes, dtype, logits.device)
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
        note_rows(each, logits, targets, ignore_index, rows)
        loss, weight = reduced(each, targets, reduction, ignore_index)
        ctx.save_for_backward(logits, targets, weight)
        ctx.settings = (reduction, ignore_index, dtype, rows)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, weight = ctx.saved_tensors
        result = of_logits(gradient, logits, targets, weight, *ctx.settings)
        return result, None, None, None, None, None


def rows_at_once(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows a processor's cache holds the softmax of, or a device computes."""
    limit_bytes = PIECE_BYTES if device.type == "cpu" else _DEVICE_PIECE_BYTES
    return max(1, limit_bytes // (classes * dtype.itemsize))


def note_rows(each: Tensor, logits: Tensor, targets: Tensor, ignore_index: int, rows: int) -> None:
    """Write the logarithm of each counted row's own class, [n, C], to `each`, [n, 1] of zeros."""
    for some, logarithms in _logarithms(logits, targets, ignore_index, each.dtype, rows):
        lost, _ = _aten.nll_loss_forward(logarithms, targets[some], None, _NONE, ignore_index)
        each[some, 0] = -lost


def reduced(
    each: Tensor, targets: Tensor, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return torch's own reduction of what all rows add, `each` [N, 1], and the rows' weight."""
    # The reduction reads one logarithm of each row: as if there were one class, 0. What marks
    # the rows to leave out must be another number, whatever the model's own ignore_index is.
    only = torch.where(targets == ignore_index, _LEFT_OUT, 0)
    loss, weight = _aten.nll_loss_forward(each, only, None, reduction, _LEFT_OUT)
    return loss, weight


def of_logits(
    gradient: Tensor,
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    """Return the gradient of some rows of logits, [n, C], of a loss whose `gradient` is given.

    `weight` is that of all rows, of which these may be a range.
    """
    result = torch.zeros_like(logits)
    for some, logarithms in _logarithms(logits, targets, ignore_index, dtype, rows):
        inner = _aten.nll_loss_backward(
            gradient, logarithms, targets[some], None, reduction, ignore_index, weight
        )
        found = _aten._log_softmax_backward_data(inner, logarithms, 1, dtype)
        result[some] = found.to(result.dtype)
    return result


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
