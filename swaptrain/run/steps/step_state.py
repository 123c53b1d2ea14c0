"""What the instructions of a program mean while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swaptrain.capture.losses.weighting import StepWeights
from swaptrain.compute.gradient_norms import total_norm
from swaptrain.durable.ledger import Ledger
from swaptrain.program.durability import CommitUnit

__all__ = ["StepState", "global_norm", "no_rate"]

LoadBatch = Callable[[int], Mapping[str, Tensor]]


@dataclass
class StepState:
    """What the instructions of a program mean at the moment: which step, which batches."""

    step: int
    """The step whose forward and backward run."""
    load: LoadBatch
    """From a micro-batch's number to its tensors."""
    update_step: int
    """The step whose update runs: the same one, or the one before when updates are deferred."""
    rate: Callable[[float], float]
    """Gives the learning rate of the update, of the one that a rule has."""
    update_norm: Tensor | None = None
    """Global norm of the gradients of the update, when they are clipped."""
    weights: StepWeights | None = None
    """How the losses of the micro-batches make the step's; None: their mean."""
    batch_weights: Sequence[StepWeights] = ()
    """Of an evaluation: how each batch weighs the terms of its loss; nothing: as means."""
    items: Callable[[int], str] = str
    """From a micro-batch's number to the items that it holds, in words."""
    clip_norm: float | None = None
    first: int = 0
    """The number of this rank's first micro-batch among those of the step."""
    micro_batches: int = 0
    """Of all ranks together; 0 where there is one."""
    merged: bool = False
    """Whether the losses of all ranks are in the ledger."""
    unit: CommitUnit = "segment"
    """What the program commits: of the unit `step` nothing, in a step that does not commit."""
    ledger: Ledger = field(default_factory=Ledger)
    beside: dict[int, list[float]] = field(default_factory=dict)
    """Of an evaluation, by batch: the numbers beside its loss."""
    update_ledger: Ledger | None = None
    """Of the update's step, when it is not the step that runs."""
    updated: set[int] = field(default_factory=set)
    """Segments that the program has updated."""
    compute_s: float = 0.0
    update_s: float = 0.0


def global_norm(ledger: Ledger, order: list[str]) -> Tensor:
    """Return the 2-norm over parameters in the model's order, from their own norms."""
    norms = [ledger.norms[name] for name in order if name in ledger.norms]
    return total_norm([torch.tensor(norm, dtype=torch.float32) for norm in norms])


def no_rate(_: float) -> float:
    """Nothing is updated."""
    return 0.0
