"""A head and its cross entropy over ranges of tokens: the logits of all tokens never exist whole.

The forward keeps the hidden states. The backward makes the logits of each range once more, and
from them the gradients of its hidden states; those of the head's weight are summed over the ranges
in float32 and rounded once. The mean over tokens is torch's own reduction of what each one adds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from swaptrain.capture.head.cross_entropy import (
    cross_entropy,
    note_rows,
    of_logits,
    reduced,
    rows_at_once,
)
from swaptrain.capture.tokens.ranges import RangeGradients, ranges

__all__ = ["HeadLoss"]


class HeadLoss:
    """A call in a segment's code: the loss of hidden states, over ranges of `tokens` of them.

    `body` makes logits, [n, C], of hidden states, [n, H], and whole values; `dtype` is what the
    cross entropy casts them to.
    """

    __module__, __name__ = __name__, "head_loss"  # as the code that fx writes calls it
    is_over_tokens = True

    def __init__(self, body: fx.Graph, tokens: int, *, classes: int, dtype: torch.dtype) -> None:
        self.body = fx.GraphModule(nn.Module(), body)
        self.tokens, self.classes, self.dtype = tokens, classes, dtype

    def __call__(
        self, hidden: Tensor, targets: Tensor, reduction: int, ignore_index: int, *whole: Tensor
    ) -> Tensor:
        """Return the loss, [], of hidden states [..., H] and their targets, (N,) of int64.

        Raises IndexError for a target that is no class, as torch does.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        if len(rows) <= self.tokens:
            shape = (len(rows), self.classes)
            logits = self.body(rows, *whole)
            return cross_entropy(
                logits, targets, reduction, ignore_index, shape=shape, dtype=self.dtype
            )
        # torch gives `apply` no types.
        loss: Tensor = _HeadByTokens.apply(self, reduction, ignore_index, rows, targets, *whole)  # type: ignore[no-untyped-call]
        return loss


class _HeadByTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: HeadLoss,
        reduction: int,
        ignore_index: int,
        hidden: Tensor,
        targets: Tensor,
        *whole: Tensor,
    ) -> Tensor:
        each = torch.zeros(len(hidden), 1, dtype=head.dtype, device=hidden.device)
        at_once = rows_at_once(head.classes, head.dtype, hidden.device)
        for own in ranges(len(hidden), head.tokens):
            logits = head.body(hidden[own], *whole)
            note_rows(each[own], logits, targets[own], ignore_index, at_once)
            del logits  # before the next ones are made
        loss, weight = reduced(each, targets, reduction, ignore_index)
        ctx.save_for_backward(hidden, targets, weight, *whole)
        ctx.head, ctx.settings = head, (reduction, ignore_index, head.dtype, at_once)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, weight, *whole = ctx.saved_tensors
        head, needs = ctx.head, ctx.needs_input_grad
        found = RangeGradients([hidden], whole, [needs[3], *needs[5:]])
        for own in ranges(len(hidden), head.tokens):
            with torch.enable_grad():
                parts = found.parts(own)
                logits = head.body(*parts, *found.leaves)
            of_range = of_logits(gradient, logits.detach(), targets[own], weight, *ctx.settings)
            found.add(own, parts, logits, of_range)
            del logits, of_range
        of_hidden, *of_whole = found.of([hidden])
        return None, None, None, of_hidden, None, *of_whole
