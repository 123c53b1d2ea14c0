"""The trained tokens of each micro-batch of a step, known before its first forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.inputs.casts import cast_as_captured
from swaptrain.capture.losses.weighting import StepWeights, step_weights
from swaptrain.compute.weighting.choice import LossWeighting
from swaptrain.data.batches import Batches
from swaptrain.errors import RunError

__all__ = ["LossWeights"]

_KEPT_BYTES = 4 << 20
"""Of the micro-batches that were read to count and are kept until they are loaded."""
_NOT_TRAINED = -100
"""The label that torch and transformers leave out by default."""
_MOST_ITEMS = 20


class LossWeights:
    """Reads the micro-batches of one data set, and weights the losses of its steps."""

    def __init__(
        self,
        data: Batches,
        weighting: LossWeighting,
        captured: Captured,
        note: Callable[[str], None],
        *,
        may_differ: bool,
    ) -> None:
        """Take the model that reads the data, and who hears what is unusual.

        `may_differ`: whether two micro-batches of this data may count unequally many tokens.
        """
        self._data, self._weighting, self._captured, self._note = data, weighting, captured, note
        self._counts = weighting.by_tokens and may_differ
        self._step = 0
        self._weights: StepWeights | None = None
        self._kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        """By step and micro-batch: what was read to count, until it is loaded."""
        self.read_s = 0.0
        """Seconds in which the main line waited for data."""
        self._watching = bool(weighting.reason)
        """Whether labels are looked at, to say that they are not weighted."""
        self._seen: set[tuple[float, ...]] = set()

    def batch(self, step: int, micro_batch: int) -> Mapping[str, Tensor]:
        """Return a micro-batch in the dtypes of the model."""
        batch = self._kept.pop((step, micro_batch), None)
        if batch is None:
            batch = self._read(step, micro_batch)
        if self._watching:
            self._look(batch)
        return batch

    def of_step(self, step: int) -> StepWeights | None:
        """Return how the losses of a step are weighted; None: by their mean.

        The same for each process that does the step: a function of the data. Raises RunError,
        naming the items, where the whole step has nothing that is trained.
        """
        if not self._counts:
            return None
        if step == self._step:
            return self._weights
        counter = self._weighting.counter
        assert counter is not None, "tokens are weighted only where they can be counted"
        self._kept.clear()
        counts, kept_bytes = [], 0
        for m in range(self._data.micro_batches):
            batch = self._read(step, m)
            counts.append(counter(batch))
            kept_bytes += sum(tensor.nbytes for tensor in batch.values())
            if kept_bytes <= _KEPT_BYTES or self._data.micro_batches == 1:
                self._kept[step, m] = batch
        if not any(map(any, counts)):
            raise RunError(
                f"step {step}: no label of all its items is one that the loss counts: "
                f"{self.items(step)}. Leave such items out of the data, or take more of them "
                "together"
            )
        self._step, self._weights = step, step_weights(counts)
        return self._weights

    def items(self, step: int, micro_batch: int | None = None) -> str:
        """Name the items of a micro-batch, or of a whole step."""
        chosen = range(self._data.micro_batches) if micro_batch is None else [micro_batch]
        numbers = [index for m in chosen for index in self._data.items(step, m)]
        shown = ", ".join(map(str, numbers[:_MOST_ITEMS]))
        more = f" and {len(numbers) - _MOST_ITEMS} more" if len(numbers) > _MOST_ITEMS else ""
        return f"item{'s' if len(numbers) > 1 else ''} {shown}{more} of {self._data.name}"

    def _read(self, step: int, micro_batch: int) -> dict[str, Tensor]:
        begun = time.perf_counter()
        read = self._data.batch(step, micro_batch)
        self.read_s += time.perf_counter() - begun
        batch = cast_as_captured(read, self._captured.model)
        self._captured.checks.verify(batch, lambda: self.items(step, micro_batch))
        return batch

    def _look(self, batch: Mapping[str, Tensor]) -> None:
        """Say once that labels are not trained and yet micro-batches are weighted alike."""
        counter, labels = self._weighting.counter, batch.get("labels")
        if counter is None:
            found = labels is not None and bool((labels == _NOT_TRAINED).any())
        else:
            self._seen.add(counter(batch))
            found = len(self._seen) > 1
        if found:
            self._watching = False
            self._note(
                f"micro-batches have unequally many trained labels, and {self._weighting}, "
                f"because {self._weighting.reason}"
            )
