"""Computes a region over ranges of tokens, forward and backward.

The forward keeps nothing but what the region reads. The backward computes each range once more and
differentiates it: gradients of rows are written range by range, those of weights are summed over
the ranges in float32 and rounded once. So what lies between input and output never exists whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

__all__ = ["RangeGradients", "TokenRanges", "ranges"]


class TokenRanges:
    """A call in a segment's code: the region of `body` over ranges of `tokens` of its `count` rows.

    Called with `row_inputs` tensors [..., C] of `count` rows, and then the whole ones; returns the
    output in `shape`.
    """

    __module__, __name__ = __name__, "token_ranges"  # as the code that fx writes calls it
    is_over_tokens = True

    def __init__(
        self, body: fx.Graph, tokens: int, *, count: int, row_inputs: int, shape: Sequence[int]
    ) -> None:
        self.body = fx.GraphModule(nn.Module(), body)
        self.tokens, self.count, self.row_inputs = tokens, count, row_inputs
        self.shape = tuple(shape)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the region's output."""
        # torch gives `apply` no types.
        out: Tensor = _RegionByTokens.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return out


class RangeGradients:
    """The gradients of a region's inputs while it is differentiated range by range."""

    def __init__(self, rows: Sequence[Tensor], whole: Sequence[Tensor], needs: Sequence[bool]):
        """Take matrices, [N, C], whole values, and which of all of these need a gradient."""
        self._rows = rows
        self._needs = needs[: len(rows)]
        self._of_rows = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(rows, self._needs, strict=True)
        ]
        self._sums: list[Tensor | None] = [None] * len(whole)
        self.leaves = [self._leaf(i, x, needs[len(rows) + i]) for i, x in enumerate(whole)]
        """The whole values, for the ranges' graphs."""

    def parts(self, own: slice) -> list[Tensor]:
        """Return a range of the rows, as leaves of a graph."""
        pairs = zip(self._rows, self._needs, strict=True)
        return [x[own].detach().requires_grad_(need) for x, need in pairs]

    def add(self, own: slice, parts: Sequence[Tensor], out: Tensor, gradient: Tensor) -> None:
        """Differentiate what was made of a range, given the gradient of that."""
        if out.requires_grad:
            torch.autograd.backward(out, gradient)
        for result, part in zip(self._of_rows, parts, strict=True):
            if result is not None:
                result[own] = 0 if part.grad is None else part.grad
                part.grad = None

    def of(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all inputs, in their shapes and dtypes."""
        found = [
            None if result is None else result.view(x.shape)
            for result, x in zip(self._of_rows, inputs, strict=False)
        ]
        whole = zip(self._sums, self.leaves, strict=True)
        return [*found, *(None if s is None else s.to(leaf.dtype) for s, leaf in whole)]

    def _leaf(self, index: int, tensor: Tensor, need: bool) -> Tensor:
        leaf = tensor.detach().requires_grad_(need)
        if need:
            # As soon as it is there, so that no two gradients of a range wait for each other.
            # torch gives hooks no types.
            leaf.register_post_accumulate_grad_hook(lambda leaf: self._sum(index, leaf))  # type: ignore[no-untyped-call]
        return leaf

    def _sum(self, index: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        total = self._sums[index]
        if total is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[index] = gradient.to(wide, copy=True)
        else:
            total.add_(gradient)


def ranges(count: int, tokens: int) -> Iterator[slice]:
    """Yield ranges of so many of `count` rows, the last of which may be smaller."""
    for first in range(0, count, tokens):
        yield slice(first, min(first + tokens, count))


class _RegionByTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: TokenRanges, *inputs: Tensor) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(*inputs)
        rows, whole = _split(region, inputs)
        out: Tensor | None = None
        for own in ranges(region.count, region.tokens):
            part = region.body(*(x[own] for x in rows), *whole)
            if out is None:
                out = part.new_empty(region.count, part.shape[1])
            out[own] = part
        assert out is not None, "a region has rows"
        return out.view(region.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        region, inputs = ctx.region, ctx.saved_tensors
        rows, whole = _split(region, inputs)
        found = RangeGradients(rows, whole, ctx.needs_input_grad[1:])
        of_out = gradient.reshape(region.count, -1)
        for own in ranges(region.count, region.tokens):
            with torch.enable_grad():
                parts = found.parts(own)
                out = region.body(*parts, *found.leaves)
            found.add(own, parts, out, of_out[own])
        return None, *found.of(inputs)


def _split(region: TokenRanges, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the row values as matrices, [N, C], and the whole values."""
    rows = [x.reshape(region.count, x.shape[-1]) for x in inputs[: region.row_inputs]]
    return rows, list(inputs[region.row_inputs :])
