"""Models that are not what was captured of them, each in a way that a graph does not show."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MEMBERS", "Layers", "c_library", "closed_over", "overwritten", "twin"]

WIDTH = 16


class Layers(nn.Module):
    """Three linear layers; `middle` is what a member changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.middle: Callable[[Tensor], Tensor] = _same

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(torch.tanh(self.a(x)))
        return F.mse_loss(self.c(torch.tanh(self.b(h))), x)


def _same(h: Tensor) -> Tensor:
    return h


def twin() -> nn.Module:
    """The model that every member is at first sight."""
    return Layers()


def overwritten() -> nn.Module:
    """Return a model whose backward needs numbers that its forward overwrites."""
    model = Layers()
    model.middle = lambda h: torch.exp(h).mul_(2.0)
    return model


def _counter_in_a_closure(model: Layers) -> None:
    calls: list[None] = []

    def middle(h: Tensor) -> Tensor:
        calls.append(None)
        return h * (1.0 + 0.1 * (len(calls) - 1))

    model.middle = middle


def _iterator(model: Layers) -> None:
    numbers = itertools.count()
    model.middle = lambda h: h * (1.0 + 0.01 * next(numbers))


class _Elsewhere:
    scale = 1.0


def _attribute_of_another_class(model: Layers) -> None:
    _Elsewhere.scale = 1.0

    def middle(h: Tensor) -> Tensor:
        _Elsewhere.scale *= 1.1
        return h * (_Elsewhere.scale / 1.1)

    model.middle = middle


def _object_of_numpy(model: Layers) -> None:
    generator = np.random.default_rng(0)
    first = generator.random(WIDTH) > 2.0  # nothing is hidden in the first forward
    masks = iter([first])

    def middle(h: Tensor) -> Tensor:
        hidden = next(masks, None)
        hidden = generator.random(WIDTH) > 0.5 if hidden is None else hidden
        return h.masked_fill(torch.from_numpy(hidden), 0.0)

    model.middle = middle


def _draw_of_the_c_library(model: Layers) -> None:
    libc = ctypes.CDLL(None)
    model.middle = lambda h: h * (1.0 + (libc.rand() % 1000) / 1000)


def _python_draw_that_rarely_matters(model: Layers) -> None:
    import random

    model.middle = lambda h: h * 0.5 if random.random() < 0.3 else h


def _assigned_buffer(model: Layers) -> None:
    def middle(h: Tensor) -> Tensor:
        model.average = 0.9 * model.average + 0.1 * h.detach().mean(0)
        return h

    model.middle = middle


def _kept_tensor(model: Layers) -> None:
    kept: list[Tensor] = []

    def middle(h: Tensor) -> Tensor:
        before = kept[-1] if kept else h.detach()
        kept.append(h.detach())
        return h + (h.detach() - before)

    model.middle = middle


def _value_read_once(model: Layers) -> None:
    first = float(model.a.weight.detach().norm())
    model.middle = lambda h: h * (float(model.a.weight.detach().norm()) / first)


def _branch_on_a_weight(model: Layers) -> None:
    limit = float(model.a.weight.detach().abs().sum())

    def middle(h: Tensor) -> Tensor:
        changed = float(model.a.weight.detach().abs().sum()) != limit
        return h * 1.01 if changed else h

    model.middle = middle


def _write_through_data(model: Layers) -> None:
    def middle(h: Tensor) -> Tensor:
        model.b.weight.data.clamp_(-0.1, 0.1)
        return h

    model.middle = middle


def _shared_by_data(model: Layers) -> None:
    model.c.bias.data = model.b.bias.data


def _gradient_hook(model: Layers) -> None:
    mask = torch.zeros(WIDTH, WIDTH)
    mask[:4] = 1
    model.a.weight.register_hook(lambda gradient: gradient * mask)


def _backward_hook(model: Layers) -> None:
    model.b.register_full_backward_hook(lambda m, given, out: (given[0] * 0.1,))


def _accumulate_hook(model: Layers) -> None:
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-4, 1e-4)

    model.a.weight.register_post_accumulate_grad_hook(clamp)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def _custom_backward(model: Layers) -> None:
    model.middle = _Reversed.apply


def _thaws(model: Layers) -> None:
    forwards = itertools.count()

    def middle(h: Tensor) -> Tensor:
        if next(forwards):
            model.c.requires_grad_(False)
        return h

    model.middle = middle


MEMBERS: dict[str, Callable[[Layers], None]] = {
    "a counter in a closure": _counter_in_a_closure,
    "an iterator": _iterator,
    "an attribute of another class": _attribute_of_another_class,
    "a generator object of numpy": _object_of_numpy,
    "a draw of the C library": _draw_of_the_c_library,
    "a Python draw that rarely matters": _python_draw_that_rarely_matters,
    "an assigned buffer": _assigned_buffer,
    "a tensor kept from the forward before": _kept_tensor,
    "a weight's value read as a number": _value_read_once,
    "a branch on a weight's value": _branch_on_a_weight,
    "a write through .data": _write_through_data,
    "storage shared through .data": _shared_by_data,
    "a gradient hook": _gradient_hook,
    "a backward hook": _backward_hook,
    "a post-accumulate hook": _accumulate_hook,
    "a custom backward": _custom_backward,
    "a layer that is frozen later": _thaws,
}


def c_library() -> nn.Module:
    """A model whose state no guard sees: it lies in the C library."""
    model = Layers()
    _draw_of_the_c_library(model)
    return model


def closed_over(member: str) -> Callable[[], nn.Module]:
    """Return the factory of a member."""

    def make() -> nn.Module:
        model = Layers()
        MEMBERS[member](model)
        return model

    return make
