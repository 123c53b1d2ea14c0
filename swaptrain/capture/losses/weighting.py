"""What a segment's code asks of the step that it runs in: how its loss is weighted.

Mean mode: a micro-batch's loss is what the model computes, and the step's loss is the mean over
micro-batches. Counted mode: a term that is a mean over trained tokens is the sum over them, divided
by the number of them in the whole step; every other term is divided by the number of micro-batches.
So in counted mode the step's loss is the sum of what the micro-batches give. The mode belongs to a
step, not to the code: the runner says it with `weighted(...)`, around forwards and recomputations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["StepWeights", "divided", "held_out_weights", "over_all", "part", "reduction", "share"]
__all__ += ["step_weights", "weighted"]

_MEAN, _SUM = 1, 2
"""torch's numbers of the reductions."""


@dataclass(frozen=True)
class StepWeights:
    """The counted mode of one step."""

    totals: tuple[float | None, ...]
    """By term of the loss: the trained tokens of all micro-batches, or the sum of their weights.

    None where all micro-batches count equally many: the term stays a mean, divided by M."""
    micro_batches: float
    """M; for one of several held-out batches, all items over its own."""


def step_weights(counts: Sequence[Sequence[float]]) -> StepWeights | None:
    """Return how a step is weighted, from the counts of its micro-batches, each by term.

    None where all of them count equally many, and some: the mean of means is then the same. A term
    that the whole step has no token of comes to 0.
    """
    totals = [
        None if term[0] > 0 and len(set(term)) == 1 else sum(term) or 1.0
        for term in zip(*counts, strict=True)
    ]
    if all(total is None for total in totals):
        return None
    return StepWeights(tuple(totals), len(counts))


def held_out_weights(
    counts: Sequence[Sequence[float]], items: Sequence[int]
) -> list[StepWeights] | None:
    """Return how each held-out batch is weighted, from its counts by term and its items.

    None where all have equally many of both: the mean of means is then the same. A term that counts
    nothing weighs as many as the batch has items.
    """
    terms = list(zip(*counts, strict=True))
    alike = all(term[0] > 0 and len(set(term)) == 1 for term in terms)
    if not terms or (alike and len(set(items)) == 1):
        return None
    totals = tuple(sum(term) or 1.0 for term in terms)
    return [StepWeights(totals, sum(items) / own) for own in items]


_active: list[tuple[StepWeights | None, Sequence[int]]] = []


@contextlib.contextmanager
def weighted(weights: StepWeights | None, terms: Sequence[int]) -> Iterator[None]:
    """Set the mode inside the block: None is mean mode; `terms` are those of the code that runs."""
    _active.append((weights, terms))
    try:
        yield
    finally:
        _active.pop()


def reduction(index: int) -> int:
    """Return torch's number of the reduction of the code's counted term `index`."""
    _, total = _total(index)
    return _MEAN if total is None else _SUM


def divided(entropy: Tensor, index: int) -> Tensor:
    """Return the part of a cross entropy, [], in the step's loss: of its sum, or of its mean."""
    weights, total = _total(index)
    if weights is None:
        return entropy
    return entropy / (weights.micro_batches if total is None else total)


def over_all(count: Tensor, index: int, elements: int) -> Tensor:
    """Return what a sum is divided by: the micro-batch's own count, or the whole step's.

    Where both are means of so many `elements`: the whole step's by their number.
    """
    _, total = _total(index)
    return count if total is None else torch.full_like(count, total / elements)


def part(mean: Tensor, index: int) -> Tensor:
    """Return the part of a term, whose count is `over_all`, in the step's loss."""
    weights, total = _total(index)
    if weights is None or total is not None:
        return mean
    return mean / weights.micro_batches


def share(term: Tensor | float) -> Tensor | float:
    """Return the part of a term that is no mean over tokens in the step's loss."""
    weights = _active[-1][0] if _active else None
    return term if weights is None else term / weights.micro_batches


def _total(index: int) -> tuple[StepWeights | None, float | None]:
    """Return the step's weights and the total of a term; of neither outside of `weighted`."""
    if not _active:
        return None, None
    weights, terms = _active[-1]
    return weights, None if weights is None else weights.totals[terms[index]]
