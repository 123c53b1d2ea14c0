"""Chooses what a run's losses are weighted by, and says so where it matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from swaptrain.capture.losses.counting import Counter
from swaptrain.capture.losses.terms import LossTerms
from swaptrain.config.data import DataConfig
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError

__all__ = ["LossWeighting", "choose_weighting"]


@dataclass(frozen=True)
class LossWeighting:
    """What `train.loss_weighting` comes to for a model."""

    config: Config
    """With the choice written out: what a run records."""
    counter: Counter | None
    """Counts trained tokens; None where the model's loss has none to count."""
    masked: bool
    """Whether labels of the first micro-batch are no ids: text of which a part is predicted."""
    reason: str
    """Why it is micro_batches, where the config left that open; else nothing."""

    @property
    def by_tokens(self) -> bool:
        """Whether each trained token of a step weighs alike."""
        return self.config.train.loss_weighting == "tokens"

    def may_differ(self, source: DataConfig) -> bool:
        """Whether two micro-batches of this data may count unequally many tokens.

        Those of text and token ids do not, where neither data nor model leave any of them out.
        """
        if self.counter is None:
            return False
        is_counted = source.python is None and source.chat is None
        return not is_counted or self.masked or not self.counter.every_id_counts

    @property
    def matters(self) -> bool:
        """Whether a start says that tokens are weighted: their numbers may differ in a step."""
        several = self.config.data.micro_batches > 1
        return several and self.by_tokens and self.may_differ(self.config.data)

    def __str__(self) -> str:
        if self.by_tokens:
            return "every trained token of a step counts alike (train.loss_weighting: tokens)"
        return "every micro-batch of a step counts alike (train.loss_weighting: micro_batches)"


def choose_weighting(
    config: Config, losses: LossTerms, batch: Mapping[str, Tensor]
) -> LossWeighting:
    """Return what `train.loss_weighting` comes to; `batch` is the first micro-batch.

    Raises ConfigError where tokens are asked for and cannot be weighted.
    """
    asked, reason = config.train.loss_weighting, ""
    if asked == "tokens" and losses.counter is None:
        raise ConfigError(
            "train.loss_weighting is tokens, and the model's loss cannot be weighted so: "
            f"{losses.reason}. Set it to micro_batches, or write the loss as a sum of terms, one "
            "of which is torch's cross_entropy of labels that come of the batch, or a sum of its "
            "rows divided by the number of trained ones"
        )
    chosen = asked or "tokens"
    if asked is None and losses.counter is None:
        chosen, reason = "micro_batches", f"the loss cannot be weighted by tokens: {losses.reason}"
    elif asked is None and "labels" not in batch:
        chosen, reason = "micro_batches", "the batch has no `labels`, and the config leaves it open"
    train = config.train.model_copy(update={"loss_weighting": chosen})
    masked = "labels" in batch and bool((batch["labels"] < 0).any())
    return LossWeighting(config.model_copy(update={"train": train}), losses.counter, masked, reason)
