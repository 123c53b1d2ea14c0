"""What each held-out batch weighs in the loss of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.inputs.casts import cast_as_captured
from swaptrain.capture.losses.counting import Counter
from swaptrain.capture.losses.weighting import StepWeights, held_out_weights
from swaptrain.compute.gradient_norms import held_out_loss, weighted_mean
from swaptrain.data.batches import Batches
from swaptrain.errors import RunError
from swaptrain.observe.eval_result import EvalResult

__all__ = ["HeldOutWeights"]


class HeldOutWeights:
    """Reads held-out batches and weighs their losses: by trained tokens, else by items.

    By tokens where the run's steps are, and the losses of all graphs of the evaluation have as many
    terms that count tokens.
    """

    def __init__(self, data: Batches, captured: Captured, *, by_tokens: bool) -> None:
        """Take the data, and the graphs that read it: one after the other, as many batches each."""
        self._data, self._captured, self._by_tokens = data, captured, by_tokens
        self._items = [len(data.items(1, m)) for m in range(data.micro_batches)]
        self._checks = [g.checks for g in captured.evaluations for _ in range(g.spec.batches)]

    @property
    def remarks(self) -> Iterator[str]:
        """What a start says: of numbers that evaluations do not have."""
        yield from dict.fromkeys(
            graph.numbers.remark for graph in self._captured.evaluations if graph.numbers.remark
        )
        if not self._by_tokens or self._counters() is not None:
            return
        reasons = (graph.losses.reason for graph in self._captured.evaluations)
        why = next(filter(None, reasons), "its batches have losses of different terms")
        yield (
            f"the loss in evaluation mode cannot be weighted by tokens: {why}. Each held-out item "
            "weighs alike"
        )

    def batch(self, m: int) -> Mapping[str, Tensor]:
        """Return a batch in the dtypes of the model."""
        batch = cast_as_captured(self._data.batch(1, m), self._captured.model)
        self._checks[m].verify(batch, lambda: self._describe(m))
        return batch

    def _describe(self, m: int) -> str:
        items = self._data.items(1, m)
        return f"eval: items {items[0]} to {items[-1]} of {self._data.name}"

    @property
    def items(self) -> int:
        """How many there are."""
        return sum(self._items)

    def by_batch(self) -> Sequence[StepWeights]:
        """Return how each batch weighs the terms of its loss; nothing where all are means."""
        return self._weights or ()

    def result(self, losses: Sequence[float], beside: Sequence[Sequence[float]]) -> EvalResult:
        """Return what was found from what the batches gave, in their order.

        A number beside the loss is a mean: over tokens where the loss is one over one count of
        them, else over items. Accuracy is the share of all labels that the loss counts.
        """
        numbers = [g.numbers for g in self._captured.evaluations for _ in range(g.spec.batches)]
        by_name = [
            dict(zip(each.scalars, given, strict=False))
            for each, given in zip(numbers, beside, strict=True)
        ]
        shares: list[float] = list(self._items)
        if self._weights is not None and all(len(counts) == 1 for counts in self._counts):
            shares = [counts[0] for counts in self._counts]
        scalars = {
            name: weighted_mean([found[name] for found in by_name], shares)
            for name in by_name[0]
            if all(name in found for found in by_name)
        }
        if all(each.has_accuracy for each in numbers):
            right, counted = (sum(given[n] for given in beside) for n in (-2, -1))
            if counted:
                scalars["accuracy"] = right / counted
        loss = held_out_loss(losses, self._items, summed=self._weights is not None)
        return EvalResult(loss, self._by_tokens, scalars)

    @cached_property
    def _weights(self) -> list[StepWeights] | None:
        """The weights by batch, for which all batches are read once: they stay the same.

        Raises RunError where no batch has anything that its loss counts.
        """
        if self._counters() is None:
            return None
        if not any(map(any, self._counts)):
            raise RunError(
                f"eval: no label of all {sum(self._items):,} items of {self._data.name} is one "
                "that the loss counts: take more items (eval.batches), or other data"
            )
        return held_out_weights(self._counts, self._items)

    @cached_property
    def _counts(self) -> list[tuple[float, ...]]:
        """What each batch's loss counts, by term; nothing where that is not known."""
        counters = self._counters() or ()
        return [counter(self.batch(m)) for m, counter in enumerate(counters)]

    def _counters(self) -> list[Counter] | None:
        """Return what counts the tokens of each batch; None where they are not weighted."""
        graphs = self._captured.evaluations
        counters = [g.losses.counter for g in graphs for _ in range(g.spec.batches)]
        found = [counter for counter in counters if counter is not None]
        if not self._by_tokens or len(found) < len(counters):
            return None
        return found if len({counter.terms for counter in found}) == 1 else None
