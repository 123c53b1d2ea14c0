"""One range of experts: which rows are its own, and their product with its weights.

S rows lie in the order of their experts. Each expert has a matrix, [K, N], and computes its rows
alone, with the kernel that the whole product calls for it: the bits do not depend on the ranges.
What the others have made is handed on. The gradient of the rows is -0.0 where they are not the
range's own, since x + -0.0 is x for each x, 0.0 too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["BOUNDS", "RANGE", "even_bounds"]

_even = False


@contextmanager
def even_bounds() -> Iterator[None]:
    """Give each expert as many rows as any other meanwhile.

    A router of zeros chooses the first ones alone, and what is measured then is of no use.
    """
    global _even
    before, _even = _even, True
    try:
        yield
    finally:
        _even = before


@torch.library.custom_op("swaptrain::expert_bounds", mutates_args=())
def _bounds(offsets: Tensor, first: int, end: int) -> Tensor:
    """Return where the rows of the experts from `first` to `end` begin, and where they end.

    `offsets` [E] are the ends of all of them; [end - first + 1].
    """
    bounds = torch.zeros(len(offsets) + 1, dtype=offsets.dtype, device=offsets.device)
    if _even:
        torch.arange(len(bounds), out=bounds)
        return bounds[first : end + 1] * offsets[-1] // len(offsets)
    bounds[1:] = offsets
    return bounds[first : end + 1].clone()


@_bounds.register_fake
def _(offsets: Tensor, first: int, end: int) -> Tensor:
    return offsets.new_empty(end - first + 1)


@torch.library.custom_op("swaptrain::expert_range", mutates_args=())
def _range(
    rows: Tensor, weight: Tensor, bounds: Tensor, others: Tensor | None, grouped: bool
) -> Tensor:
    """Return the products of a range's rows, and of all other rows what `others` has.

    `rows` [S, K], `weight` [n, K, N], `bounds` [n + 1], `others` [S, N]; [S, N]. `grouped`: the
    whole is a product of torch's own, which a device has a kernel for.
    """
    if others is None:
        out = rows.new_zeros(rows.shape[0], weight.shape[2])
    else:
        out = others.clone(memory_format=torch.contiguous_format)
    edges = bounds.tolist()
    if grouped and rows.device.type != "cpu":
        own = slice(edges[0], edges[-1])
        if own.start < own.stop:
            out[own] = torch._grouped_mm(rows[own], weight, offs=_ends(bounds))
        return out
    for expert, own in _slices(edges):
        torch.mm(rows[own], weight[expert], out=out[own])
    return out


@_range.register_fake
def _(rows: Tensor, weight: Tensor, bounds: Tensor, others: Tensor | None, grouped: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("swaptrain::expert_range_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    bounds: Tensor,
    grouped: bool,
    to_rows: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weights; [0] of what is not asked for.

    That of the weights is asked for by giving the `rows`.
    """
    edges = bounds.tolist()
    on_device = grouped and gradient.device.type != "cpu" and edges[0] < edges[-1]
    all_own = slice(edges[0], edges[-1])
    of_rows, of_weight = gradient.new_empty(0), gradient.new_empty(0)
    if to_rows:
        of_rows = gradient.new_full((gradient.shape[0], weight.shape[1]), -0.0)
        if on_device:
            back = weight.transpose(-2, -1)
            of_rows[all_own] = torch._grouped_mm(gradient[all_own], back, offs=_ends(bounds))
        else:
            for expert, own in _slices(edges):
                torch.mm(gradient[own], weight[expert].t(), out=of_rows[own])
    if rows is not None:
        of_weight = torch.zeros_like(weight)
        # As autograd makes it for torch's own product: row-major where the matrices are, else the
        # transposed one, whose memory is row-major.
        turned = grouped and weight.stride(1) == 1
        target = of_weight.transpose(-2, -1) if turned else of_weight
        pair = (gradient, rows) if turned else (rows, gradient)
        if on_device:
            left, right = (tensor[all_own] for tensor in pair)
            target.copy_(torch._grouped_mm(left.t(), right, offs=_ends(bounds)))
        else:
            for expert, own in _slices(edges):
                torch.mm(pair[0][own].t(), pair[1][own], out=target[expert])
    return of_rows, of_weight


@_backward.register_fake
def _(
    gradient: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    bounds: Tensor,
    grouped: bool,
    to_rows: bool,
) -> tuple[Tensor, Tensor]:
    none = gradient.new_empty(0)
    of_rows = gradient.new_empty(gradient.shape[0], weight.shape[1]) if to_rows else none
    return of_rows, none.clone() if rows is None else torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, bounds, _, ctx.grouped = inputs
    ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, bounds)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, bounds = ctx.saved_tensors
    to_rows, to_weight, _, to_others, _ = ctx.needs_input_grad
    of_rows, of_weight = BACKWARD(gradient, rows, weight, bounds, ctx.grouped, to_rows)
    return (
        of_rows if to_rows else None,
        of_weight if to_weight else None,
        None,
        gradient if to_others else None,  # the others look at no row but their own
        None,
    )


_range.register_autograd(_gradients, setup_context=_keep)

BOUNDS = torch.ops.swaptrain.expert_bounds.default
RANGE = torch.ops.swaptrain.expert_range.default
BACKWARD = torch.ops.swaptrain.expert_range_backward.default


def _slices(edges: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the experts of a range that have rows, and these."""
    for expert, (first, end) in enumerate(pairwise(edges)):
        if first < end:
            yield expert, slice(first, end)


def _ends(bounds: Tensor) -> Tensor:
    """Return where the rows of each expert end, counted from the range's first row."""
    return (bounds[1:] - bounds[0]).int()
