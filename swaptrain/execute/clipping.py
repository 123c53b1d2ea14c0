"""The numbers formed over a whole step: the gradient norm, its clipping and the mean loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swaptrain.errors import NotFiniteError

__all__ = ["FiniteNorm", "clip_coefficient", "gradient_norm", "mean_loss", "total_norm"]


class FiniteNorm:
    """The 2-norm of one parameter's gradient, which is shown to it whole or in pieces.

    Of the whole it has torch's bits; of pieces the last ones may be others.
    """

    def __init__(self, name: str, *, segment: int, step: int) -> None:
        """Take whose gradient it is, for the message where one is not finite."""
        self._described = f"step {step}: the gradient of {name} (segment {segment})"
        self._squares = 0.0

    def add(self, piece: Tensor) -> None:
        """Take the norm of a piece; raises NotFiniteError where an element is not finite."""
        norm = float(gradient_norm(piece))
        # The sum of finite squares may be infinite. The largest element takes no temporary to find.
        if not math.isfinite(norm) and not math.isfinite(torch.linalg.vector_norm(piece, math.inf)):
            raise NotFiniteError(
                f"{self._described} is not finite; its segment stays as it was committed last. "
                "Look at the data of this step; else go back to a snapshot (--from-step, where "
                "store.keep made one), or start over with --fresh, a lower optimizer.lr or "
                "optimizer.clip_norm"
            )
        self._squares += norm * norm

    @property
    def value(self) -> float:
        """The norm of all pieces."""
        return math.sqrt(self._squares)


def gradient_norm(gradient: Tensor) -> Tensor:
    """Return the 2-norm of one whole parameter's gradient, float32 [], as of a float32 copy.

    The gradient must have the parameter's own layout: the order of memory is part of the bits, and
    so is the number of threads.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient, 2.0, dtype=torch.float32)
    return norm


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """Return the global norm, [], of per-parameter norms given in the model's order.

    The same as `torch.nn.utils.get_total_norm` of the gradients, bit for bit on a CPU. 0 if no
    parameter has a gradient.
    """
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), 2.0)
    return total


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return what every gradient is multiplied by, [], at most 1.

    `clip_grad_norm_` multiplies by it also where it is 1; that changes no bit and may be skipped.
    """
    return torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of the micro-batches' losses, summed in float64 in their order."""
    # Not `sum`: since Python 3.12 it compensates the rounding, so the bits depend on the version.
    total = 0.0
    for loss in losses:
        total += loss
    return total / len(losses)
