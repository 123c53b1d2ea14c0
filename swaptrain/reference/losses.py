"""The loss of a step, with the gradients it leaves, and that of held-out batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from swaptrain.capture.forward.loss import loss_of
from swaptrain.capture.inputs.casts import cast_batch
from swaptrain.capture.losses.weighting import StepWeights, held_out_weights, step_weights
from swaptrain.compute.gradient_norms import held_out_loss, step_loss
from swaptrain.compute.weighting.plain import CountedCalls, WeightedCalls
from swaptrain.errors import ConfigError
from swaptrain.generators import noted_generators
from swaptrain.reference.masters import Masters

__all__ = ["evaluate", "forward_backward"]


def forward_backward(
    model: nn.Module,
    masters: Masters,
    batch: Callable[[int], dict[str, Tensor]],
    micro_batches: int,
    loss_weighting: str | None,
    scaler: GradScaler,
    *,
    ranks: int = 1,
) -> float:
    """Accumulate the gradients of a step and return its loss.

    As the mean of means first; where tokens are weighted and the counts found by then differ, all
    of it once more, from the same buffers and generators.
    """
    before, each = _Before(model), micro_batches // ranks
    counts: list[list[float]] = []

    def accumulate(forward: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]) -> list[float]:
        losses = []
        for m in range(micro_batches):
            loss, share = forward(batch(m))
            scaler.scale(share).backward()  # type: ignore[no-untyped-call]  # of torch
            losses.append(float(loss.detach()))
            masters.accumulate()
            if ranks > 1 and m % each == each - 1:
                masters.end_rank()
        masters.end_step()
        return losses

    def as_mean(given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss, found = _counted(model, given, loss_weighting)
        counts.append(found)
        return loss, loss / micro_batches

    losses = accumulate(as_mean)
    weights = step_weights(counts)
    if weights is None:
        return step_loss(losses, None)

    def weighted(given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = _weighted(model, given, weights)
        return loss, loss

    before.restore()
    masters.forget()
    try:
        return step_loss(accumulate(weighted), weights)
    except ConfigError:  # the loss is no sum with a cross entropy
        if loss_weighting is not None:
            raise
    before.restore()
    masters.forget()
    return forward_backward(
        model, masters, batch, micro_batches, "micro_batches", scaler, ranks=ranks
    )


def evaluate(
    model: nn.Module,
    held_out: Sequence[Mapping[str, Tensor]],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device | str = "cpu",
    loss_weighting: str | None = None,
) -> float:
    """Put the model into evaluation mode and return the loss of the held-out batches.

    Without gradients, each batch once, its tensors in `dtypes` by key (None: as they are). A batch
    weighs as many as it has items, so that a last, smaller one does not count for more; with the
    `loss_weighting` of `train_reference` its cross entropies weigh as many as they have tokens.
    """
    model.eval()
    batches = [
        {key: value.to(device) for key, value in given.items()}
        for given in (held_out if dtypes is None else (cast_batch(b, dtypes) for b in held_out))
    ]
    items = [len(next(iter(batch.values()))) for batch in batches]
    with torch.no_grad():
        found = [_counted(model, batch, loss_weighting) for batch in batches]
        losses, counts = [float(loss) for loss, _ in found], [count for _, count in found]
        weights = held_out_weights(counts, items)
        if weights is None:
            return held_out_loss(losses, items, summed=False)
        try:
            weighted = [
                float(_weighted(model, batch, own))
                for batch, own in zip(batches, weights, strict=True)
            ]
        except ConfigError:  # the loss is no sum with a cross entropy
            return held_out_loss(losses, items, summed=False)
        return held_out_loss(weighted, items, summed=True)


def _counted(
    model: nn.Module, batch: Mapping[str, Tensor], loss_weighting: str | None
) -> tuple[Tensor, list[float]]:
    """Return the loss of a batch and how many tokens its cross entropies have, if these weigh."""
    by_tokens = loss_weighting == "tokens" or (loss_weighting is None and "labels" in batch)
    calls = CountedCalls()
    mode: AbstractContextManager[Any] = calls if by_tokens else nullcontext()
    with mode:
        loss = loss_of(model(**batch), model, batch.keys())
    return loss, calls.counts


def _weighted(model: nn.Module, batch: Mapping[str, Tensor], weights: StepWeights) -> Tensor:
    """Return the loss of a batch whose cross entropies are summed and weighted."""
    with WeightedCalls(weights) as calls:
        loss = loss_of(model(**batch), model, batch.keys())
    calls.check(loss)
    return loss


class _Before:
    """What a forward changes: the buffers and the generators."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = [buffer.clone() for buffer in model.buffers()]
        self._restore_generators = noted_generators()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Bring back what was there."""
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        self._restore_generators()
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
