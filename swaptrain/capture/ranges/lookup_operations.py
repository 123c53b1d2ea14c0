"""One range of the rows of an embedding: which indices are its own, and their rows.

Each index takes one row, and the gradient of a row is the sum over its indices in their order: the
bits do not depend on the ranges. What other ranges have found is handed on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["FIRST", "LOOKUP"]

_aten = torch.ops.aten
_NOBODY = -1
"""The index that stands for all of other ranges: no row has it."""


@torch.library.custom_op("swaptrain::first_row", mutates_args=())
def _first_row(indices: Tensor, first: int, rows: int) -> Tensor:
    """Return `first`, [1], as a tensor: so that ranges of a size share their code.

    Raises IndexError, as torch does, where one of the `indices` is none of an embedding of `rows`;
    a device stops by itself.
    """
    inside = ((indices >= 0) & (indices < rows)).all()
    if indices.device.type != "cpu":
        torch._assert_async(inside, "index out of range in self")
    elif not inside:
        raise IndexError("index out of range in self")
    return torch.full((1,), first, dtype=torch.int64, device=indices.device)


@_first_row.register_fake
def _(indices: Tensor, first: int, rows: int) -> Tensor:
    return indices.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("swaptrain::lookup_range", mutates_args=())
def _lookup(
    indices: Tensor, weight: Tensor, first: Tensor, others: Tensor | None, padding: int
) -> Tensor:
    """Return the rows of a range's indices, and of all other indices what `others` has.

    `indices` [...], `weight` [n, D], `first` [1]: the number of its first row, `others` [..., D];
    [..., D]. The row numbered `padding` gets no gradient; -1: each does.
    """
    own, places = _places(indices, first, len(weight))
    found = _aten.embedding(weight, places)
    if others is None:
        others = found.new_zeros(())
    return torch.where(own.unsqueeze(-1), found, others).contiguous()


@_lookup.register_fake
def _(
    indices: Tensor, weight: Tensor, first: Tensor, others: Tensor | None, padding: int
) -> Tensor:
    return weight.new_empty(*indices.shape, weight.shape[1])


@torch.library.custom_op("swaptrain::lookup_range_backward", mutates_args=())
def _backward(gradient: Tensor, indices: Tensor, first: Tensor, rows: int, padding: int) -> Tensor:
    """Return the gradient of a range of `rows` rows, [rows, D]."""
    own, places = _places(indices, first, rows)
    if padding != _NOBODY:
        own = own & (indices != padding)
    places = places.masked_fill(~own, _NOBODY)
    found: Tensor = _aten.embedding_dense_backward(gradient, places, rows, _NOBODY, False)
    return found


@_backward.register_fake
def _(gradient: Tensor, indices: Tensor, first: Tensor, rows: int, padding: int) -> Tensor:
    return gradient.new_empty(rows, gradient.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, weight, first, _, ctx.padding = inputs
    ctx.rows = len(weight)
    ctx.save_for_backward(indices, first)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    indices, first = ctx.saved_tensors
    _, to_weight, _, to_others, _ = ctx.needs_input_grad
    return (
        None,
        BACKWARD(gradient, indices, first, ctx.rows, ctx.padding) if to_weight else None,
        None,
        gradient if to_others else None,  # the others look at no index but their own
        None,
    )


_lookup.register_autograd(_gradients, setup_context=_keep)

FIRST = torch.ops.swaptrain.first_row.default
LOOKUP = torch.ops.swaptrain.lookup_range.default
BACKWARD = torch.ops.swaptrain.lookup_range_backward.default


def _places(indices: Tensor, first: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return which indices are of a range, and their rows in it; of the others some row."""
    places = indices - first.reshape(())  # whose shape an index alone keeps
    own = (places >= 0) & (places < rows)
    return own, places.clamp(0, rows - 1)
