"""One range of experts that all rows go through: the product of their rows with their weights.

Each expert has as many rows as the others, [E, T, K]. The bits of each do not depend on how many
there are, as long as all go to one kernel (`least_experts`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["BATCH_RANGE", "FIRST_EXPERT", "least_experts"]

_SMALL_NUMBERS = 4096
"""A bfloat16 product of no more multiplications goes to another kernel, which torch chooses by
`checksize` in aten/src/ATen/native/mkldnn/Matmul.cpp."""


def least_experts(experts: int, multiplications: int) -> int:
    """Return how few experts have the bits that they have among all, by those of one's product.

    One alone may go to the kernel of a single product. Tried over 10,800 products and more
    (`tests/capture/test_batch_products.py`).
    """
    if experts * multiplications <= _SMALL_NUMBERS:
        return 2
    return max(2, _SMALL_NUMBERS // multiplications + 1)


@torch.library.custom_op("swaptrain::first_expert", mutates_args=())
def _first_expert(rows: Tensor, first: int) -> Tensor:
    """Return `first`, [1], as a tensor: so that ranges of a size share their code."""
    return torch.full((1,), first, dtype=torch.int64, device=rows.device)


@_first_expert.register_fake
def _(rows: Tensor, first: int) -> Tensor:
    return rows.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("swaptrain::batch_range", mutates_args=())
def _range(rows: Tensor, weight: Tensor, first: Tensor, others: Tensor | None) -> Tensor:
    """Return the products of a range's experts, and of all others what `others` has.

    `rows` [E, T, K], `weight` [n, K, N], `first` [1]: the first of the experts, `others` [E, T, N];
    [E, T, N].
    """
    if others is None:
        out = rows.new_zeros(*rows.shape[:2], weight.shape[2])
    else:
        out = others.clone(memory_format=torch.contiguous_format)
    own = _own(first, weight)
    out[own] = torch.bmm(rows[own], weight)
    return out


@_range.register_fake
def _(rows: Tensor, weight: Tensor, first: Tensor, others: Tensor | None) -> Tensor:
    return rows.new_empty(*rows.shape[:2], weight.shape[2])


@torch.library.custom_op("swaptrain::batch_range_backward", mutates_args=())
def _backward(
    gradient: Tensor, rows: Tensor | None, weight: Tensor, first: Tensor, to_rows: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weights; [0] of what is not asked for.

    That of the weights is asked for by giving the `rows`. That of rows of other experts is -0.0.
    """
    own = _own(first, weight)
    of_rows, of_weight = gradient.new_empty(0), gradient.new_empty(0)
    if to_rows:
        of_rows = gradient.new_full((*gradient.shape[:2], weight.shape[1]), -0.0)
        of_rows[own] = torch.bmm(gradient[own], weight.transpose(1, 2))
    if rows is not None:
        of_weight = torch.bmm(rows[own].transpose(1, 2), gradient[own])
    return of_rows, of_weight


@_backward.register_fake
def _(
    gradient: Tensor, rows: Tensor | None, weight: Tensor, first: Tensor, to_rows: bool
) -> tuple[Tensor, Tensor]:
    none = gradient.new_empty(0)
    of_rows = gradient.new_empty(*gradient.shape[:2], weight.shape[1]) if to_rows else none
    return of_rows, none.clone() if rows is None else weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, first, _ = inputs
    ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, first)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, first = ctx.saved_tensors
    to_rows, to_weight, _, to_others = ctx.needs_input_grad
    of_rows, of_weight = BACKWARD(gradient, rows, weight, first, to_rows)
    return (
        of_rows if to_rows else None,
        of_weight if to_weight else None,
        None,
        gradient if to_others else None,  # the others look at no row but their own
    )


_range.register_autograd(_gradients, setup_context=_keep)

FIRST_EXPERT = torch.ops.swaptrain.first_expert.default
BATCH_RANGE = torch.ops.swaptrain.batch_range.default
BACKWARD = torch.ops.swaptrain.batch_range_backward.default


def _own(first: Tensor, weight: Tensor) -> slice:
    begin = int(first)
    return slice(begin, begin + len(weight))
