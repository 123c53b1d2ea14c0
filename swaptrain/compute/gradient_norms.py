"""The numbers formed over a whole step: the gradient norm, its clipping and the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swaptrain.capture.losses.weighting import StepWeights
from swaptrain.errors import NotFiniteError

__all__ = ["GradientNorms", "clip_coefficient", "gradient_norm", "held_out_loss", "mean_loss"]
__all__ += ["step_loss"]
__all__ += ["total_norm", "weighted_mean"]

_LEAST_SCALE = 2.0**-14
"""Of a float16 loss, the least normal number: a gradient that overflows below it is over 10^9."""


class GradientNorms:
    """The 2-norms of one segment's gradients, each of which is shown whole or in pieces.

    Of a whole one it has torch's bits; of pieces the last ones may be others. On a device that
    computes beside the host nothing is waited for: `send` lets the host have what was shown, and
    `read` looks at it after the mark that follows.
    """

    def __init__(
        self,
        *,
        segment: int,
        step: int,
        bring_back: Callable[[Tensor], Tensor] | None = None,
        scale: float | None = None,
    ) -> None:
        """Take whose gradients they are, for the message where one is not finite.

        `bring_back` is that of a device that computes beside the host. With the `scale` of a scaled
        loss, a power of two, norms are those without it, and infinite where a gradient is not
        finite, which is no error then.
        """
        self._scale = scale
        self._segment, self._step, self._bring_back = segment, step, bring_back
        self._squares: dict[str, float] = {}
        self._shown: list[tuple[str, Tensor]] = []
        """Name, and on the device the norm and the largest magnitude, [2]."""
        self._sent: list[tuple[str, Tensor]] = []
        """The same on the host, after the mark that follows `send`."""

    def __contains__(self, name: str) -> bool:
        """Whether the gradient of this parameter, or a piece of it, was shown."""
        return name in self._squares

    def add(self, name: str, piece: Tensor) -> None:
        """Take the norm of a piece; raises NotFiniteError where the host knows at once."""
        norm = gradient_norm(piece)  # []
        self._squares.setdefault(name, 0.0)
        if self._bring_back is None:
            value = float(norm)
            # The largest element takes no temporary to find.
            self._count(name, value, value if math.isfinite(value) else float(_largest(piece)))
        elif piece.numel():
            self._shown.append((name, torch.stack((norm, _largest(piece)))))

    def send(self) -> None:
        """Let the host have what was shown so far, after the next mark."""
        if self._shown and self._bring_back is not None:
            names, pairs = zip(*self._shown, strict=True)  # a pair: [2]
            self._sent.extend(zip(names, self._bring_back(torch.stack(pairs)), strict=True))
            self._shown.clear()

    def read(self) -> dict[str, float]:
        """Return the norm of each gradient, of all that was sent and is on the host by now.

        Raises NotFiniteError where an element is not finite.
        """
        for name, pair in self._sent:
            self._count(name, *pair.tolist())
        self._sent.clear()
        return {name: math.sqrt(squares) for name, squares in self._squares.items()}

    def _count(self, name: str, norm: float, largest: float) -> None:
        finite = math.isfinite(largest)
        if self._scale is not None and (finite or self._scale > _LEAST_SCALE):
            norm = norm / self._scale if finite else math.inf
        elif not finite and self._scale is not None:
            raise NotFiniteError(
                f"step {self._step}: the gradient of {name} (segment {self._segment}) is not "
                f"finite with a loss scale of {self._scale:g} either: float16 cannot hold it. Look "
                "at the data of this step; else go back to a snapshot (--from-step, where "
                "store.keep made one), or start over with --fresh in bfloat16 or float32",
                step=self._step,
            )
        elif not finite:  # the sum of finite squares may be infinite
            raise NotFiniteError(
                f"step {self._step}: the gradient of {name} (segment {self._segment}) is not "
                "finite; its segment stays as it was committed last. Look at the data of this "
                "step; else go back to a snapshot (--from-step, where store.keep made one), or "
                "start over with --fresh, a lower optimizer.lr or optimizer.clip_norm",
                step=self._step,
            )
        self._squares[name] += norm * norm


def gradient_norm(gradient: Tensor) -> Tensor:
    """Return the 2-norm of one whole parameter's gradient, float32 [], as of a float32 copy.

    The gradient must have the parameter's own layout: the order of memory is part of the bits, and
    so is the number of threads.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient, 2.0, dtype=torch.float32)
    return norm


def _largest(gradient: Tensor) -> Tensor:
    """Return the largest magnitude, float32 []; NaN where an element is."""
    largest: Tensor = torch.linalg.vector_norm(gradient, math.inf)
    return largest.float()  # with a dtype torch would widen all of a narrow one first


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """Return the global norm, [], of per-parameter norms given in the model's order.

    The same as `torch.nn.utils.get_total_norm` of the gradients, bit for bit on a CPU. 0 if no
    parameter has a gradient.
    """
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device  # each norm: []
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), 2.0)
    return total


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return what every gradient is multiplied by, [], at most 1.

    `clip_grad_norm_` multiplies by it also where it is 1; that changes no bit and may be skipped.
    """
    return torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)


def step_loss(losses: Sequence[float], weights: StepWeights | None) -> float:
    """Return the loss of a step from those of its micro-batches.

    With `weights` each is a part of it, else it is their mean; in float64, in their order.
    """
    return mean_loss(losses) if weights is None else _sum(losses)


def held_out_loss(losses: Sequence[float], items: Sequence[int], *, summed: bool) -> float:
    """Return the loss of an evaluation from those of its batches, in their order, in float64.

    `summed`: each is a part of it. Else each is a mean, and weighs as many as its batch has
    `items`; batches that have equally many give `mean_loss`, bit for bit.
    """
    if summed:
        return _sum(losses)
    return weighted_mean(losses, items)


def weighted_mean(numbers: Sequence[float], shares: Sequence[float]) -> float:
    """Return the mean of numbers in float64, in their order, each as often as its share says.

    A number whose share is 0 does not count, whatever it is.
    """
    if len(set(shares)) <= 1:
        return mean_loss(numbers)
    parts = [number * own for number, own in zip(numbers, shares, strict=True) if own]
    return _sum(parts) / _sum(shares)


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of the micro-batches' losses, summed in float64 in their order."""
    return _sum(losses) / len(losses)


def _sum(losses: Sequence[float]) -> float:
    # Not `sum`: since Python 3.12 it compensates the rounding, so the bits depend on the version.
    total = 0.0
    for loss in losses:
        total += loss
    return total
