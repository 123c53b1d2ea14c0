"""Two steps of the plain model and of the captured segments, compared tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from swaptrain.capture.captured import Captured
from swaptrain.errors import CaptureError
from swaptrain.planning.check_capture.draws import python_draws
from swaptrain.planning.check_capture.eager import EagerSteps
from swaptrain.planning.check_capture.segments import SegmentSteps

__all__ = ["STEPS", "TOLERANCE", "Comparison", "compare"]

STEPS = 2
TOLERANCE = 1e-4
"""Largest difference that rounding may make, relative as `_Findings` says."""
_MOVE = 1e-2
"""How far the update between the steps moves all weights together, relative to their norm."""
_SMALL = 1e-2
"""A gradient's difference is relative to its largest element, or to this part of the largest one of
all gradients: a gradient that is zero but for rounding has no relative error."""
_FORWARDS = 24
"""Further forwards of a model that draws outside of torch: each may draw something else."""


@dataclass(frozen=True)
class Comparison:
    """The largest relative difference that was found, and of what; 0.0 means the same bits."""

    difference: float
    where: str


@dataclass
class _Findings:
    """Differences of the step that is compared."""

    step: int
    scale: float = 0.0
    """The largest element of all gradients of the plain model."""
    differences: dict[str, float] = field(default_factory=dict)
    """By what differs: how much, relative to the largest element of the plain model's tensor."""

    def add(self, what: str, plain: Tensor, other: Tensor, least: float = 0.0) -> None:
        """Compare two tensors; `least` is the smallest number that a difference is relative to."""
        difference = _relative(plain, other, least)
        if difference:
            self.differences[what] = difference

    @property
    def worst(self) -> tuple[str, float]:
        """What differs most, and by how much."""
        return max(self.differences.items(), key=lambda item: item[1], default=("", 0.0))


def compare(
    model: nn.Module, captured: Captured, batch: Mapping[str, Tensor], *, seed: int
) -> Comparison:
    """Take two steps on one micro-batch with both, and compare all that comes of them.

    Losses, the gradients of parameters, parameters and buffers. Between the steps the same plain
    update moves the weights of both, by the gradients of the plain model. Raises CaptureError where
    they differ by more than `TOLERANCE`. `model` is changed.
    """
    draws = any(captured.random)
    eager = EagerSteps(model, batch, draws=draws)
    _check_names(eager, captured)
    weights = {name: p.detach().clone() for name, p in eager.parameters.items()}
    ranges = {
        name: weights[spec.rows.whole][spec.rows.first : spec.rows.end]
        for name, spec in captured.model.parameters.items()
        if spec.rows is not None
    }
    begin = {name: buffer.detach().clone() for name, buffer in eager.buffers().items()}
    segments = SegmentSteps(captured, {**weights, **ranges}, batch, seed=seed, draws=draws)
    before = python_draws()
    worst, where = 0.0, ""
    for number in range(1, STEPS + 1):
        found = _Findings(number)
        plain_loss, loss = _step(eager, segments, found, captured.model.parameters)
        for name, weight in weights.items():
            found.add(f"the parameter {name} itself", eager.parameters[name].detach(), weight)
        _compare_buffers(eager.buffers(), begin, segments.buffers, found)
        what, difference = found.worst
        if difference > TOLERANCE:
            raise CaptureError(_explain(found, plain_loss, loss))
        if difference > worst:
            worst, where = difference, f"{what}, step {number}"
        if number < STEPS:
            _update(eager, weights)
    if python_draws() != before:
        _check_other_draws(eager)
    return Comparison(worst, where)


def _step(
    eager: EagerSteps, segments: SegmentSteps, found: _Findings, names: Iterable[str]
) -> tuple[float, float]:
    """Take one step with both and compare losses and the gradients of names; return the losses."""
    plain_loss = eager.step(found.step)
    gradients = {n: g for n in names if (g := eager.gradient(n)) is not None}
    found.scale = max((_largest(g) for g in gradients.values()), default=0.0)
    delivered: set[str] = set()

    def sink(name: str, gradient: Tensor) -> None:
        delivered.add(name)
        plain = gradients.get(name)
        if plain is None:
            found.differences[f"the gradient of {name} (plain PyTorch gives none)"] = math.inf
        else:
            found.add(f"the gradient of {name}", plain, gradient, _SMALL * found.scale)

    loss = segments.step(found.step, sink)
    for name in gradients.keys() - delivered:
        found.differences[f"the gradient of {name} (the captured graph gives none)"] = math.inf
    found.add("the loss", plain_loss.reshape(()), loss.reshape(()))
    return float(plain_loss), float(loss)


def _compare_buffers(
    now: Mapping[str, Tensor],
    begin: Mapping[str, Tensor],
    captured: Mapping[str, Tensor],
    found: _Findings,
) -> None:
    """Compare the plain model's buffers with the captured ones, or with what they began as."""
    for name, buffer in now.items():
        expected = captured.get(name, begin.get(name))
        if expected is not None:
            found.add(f"the buffer {name}", buffer.detach(), expected)


def _update(eager: EagerSteps, weights: Mapping[str, Tensor]) -> None:
    """Move the weights of both along the plain model's gradient, in place."""
    trained = [(n, g) for n in eager.parameters if (g := eager.gradient(n)) is not None]
    size = _norm(weights[name] for name, _ in trained)
    length = _norm(gradient for _, gradient in trained)
    rate = _MOVE * size / length if length > 0 and math.isfinite(length) else 0.0
    with torch.no_grad():
        for name, gradient in trained:
            change = gradient * rate
            eager.parameters[name].sub_(change)
            weights[name].sub_(change)


def _check_other_draws(eager: EagerSteps) -> None:
    """Refuse a model whose loss depends on Python's or numpy's random numbers.

    A graph keeps what was drawn while it was captured. That two steps agree may be luck: a layer
    that is left out now and then was left out in none of them.
    """
    begin = {name: buffer.detach().clone() for name, buffer in eager.buffers().items()}
    losses = []
    for _ in range(_FORWARDS):
        losses.append(eager.loss(STEPS + 1))
        with torch.no_grad():
            for name, buffer in eager.buffers().items():
                if name in begin:
                    buffer.copy_(begin[name])
    if any(_relative(losses[0], loss, 0.0) > TOLERANCE for loss in losses):
        raise CaptureError(
            "the forward draws from Python's random or from numpy.random, and its loss depends on "
            "what is drawn: the captured graph would use one draw for ever. Draw with torch "
            "(torch.rand, nn.Dropout), or set the probability to 0"
        )


def _check_names(eager: EagerSteps, captured: Captured) -> None:
    specs = captured.model.parameters.values()
    made = {spec.name if spec.rows is None else spec.rows.whole for spec in specs}
    names = eager.parameters.keys() ^ made
    if names:
        raise CaptureError(
            f"the factory makes other parameters when it is called again: {sorted(names)[0]} is "
            "only in one of the two models. It has to make the same model each time"
        )


def _explain(found: _Findings, plain_loss: float, loss: float) -> str:
    what, difference = found.worst
    by = "" if math.isinf(difference) else f" by {difference:.2g} of its largest element"
    others = len(found.differences) - 1
    also = f", and {others} more" if others > 0 else ""
    losses = f"the loss is {loss:.7g}, in plain PyTorch {plain_loss:.7g}"
    if found.step > 1:
        hint = (
            "The first step agrees, so look for what a forward keeps for the next one (attributes, "
            "lists, counters, caches, global variables), draws outside of torch (random, numpy), "
            "or reads once (a weight's value as a Python number)"
        )
    elif "the loss" not in found.differences:
        hint = (
            "The loss agrees, so look for what changes gradients or state alone: hooks "
            "(register_hook, backward hooks), .data, custom backward functions, buffers that are "
            "assigned"
        )
    else:
        hint = (
            "Look for a branch that depends on values or on earlier calls, random numbers that are "
            "not torch's, and operations that another library carries out"
        )
    return (
        "the captured graph does not compute what the model computes in plain PyTorch. In step "
        f"{found.step} {what} differs{by}{also}; {losses}.\n  what to do: {hint}. "
        "train.check_capture: false trains the captured graph without this comparison"
    )


def _relative(plain: Tensor, other: Tensor, least: float) -> float:
    """Return the largest difference relative to the largest element; 0.0 for the same bits."""
    if plain.shape != other.shape or plain.dtype != other.dtype:
        return math.inf
    if torch.equal(plain, other):
        return 0.0
    if not (plain.is_floating_point() or plain.is_complex()):
        return math.inf
    same = (plain == other) | (plain.isnan() & other.isnan())
    if same.all():
        return 0.0
    gap = torch.where(same, 0, plain - other).abs().max()
    scale = max(_largest(plain), least)
    return float(gap) / scale if math.isfinite(float(gap)) and scale > 0 else math.inf


def _largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude of a tensor; 0.0 where it has no element."""
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the 2-norm of tensors together, in float64."""
    norms = [float(torch.linalg.vector_norm(tensor.detach())) for tensor in tensors]
    return math.sqrt(sum(norm**2 for norm in norms))
