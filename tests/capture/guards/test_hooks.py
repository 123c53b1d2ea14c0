"""Hooks of autograd: a parameter's are carried out as in plain PyTorch, the others refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swaptrain.errors import CaptureError
from tests.capture.guards.members import WIDTH, Base, batches
from tests.capture.in_memory import (
    captured_model,
    cut_everywhere,
    cut_into,
    eager_step,
    segment_step,
)
from tests.support.matrix import every

pytestmark = pytest.mark.trains


class Masked(Base):
    def prepare(self) -> None:
        mask = torch.zeros(WIDTH, WIDTH)
        mask[:4] = 1
        self.a.weight.register_hook(lambda g: g * mask)


class RowsZeroed(Base):
    """Writes to the gradient that it is given."""

    def prepare(self) -> None:
        def zero(g: Tensor) -> None:
            g[4:] = 0

        def zero_and_return(g: Tensor) -> Tensor:
            g[:, 2:5] = 0
            return g

        self.a.weight.register_hook(zero)
        self.b.weight.register_hook(zero_and_return)


class Normalised(Base):
    """Not linear in the gradient, and after another hook: order and micro-batches count."""

    def prepare(self) -> None:
        self.a.weight.register_hook(lambda g: g / (g.norm() + 1e-6))
        self.a.weight.register_hook(lambda g: g.clamp(-0.02, 0.02))
        self.c.bias.register_hook(torch.sign)


class Method(Base):
    """A bound method that reads a buffer of the module."""

    def prepare(self) -> None:
        self.register_buffer("scale", torch.full((WIDTH,), 0.25))
        self.b.bias.register_hook(self.scaled)

    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient * self.scale


class LargeMask(Base):
    """A mask that is large enough to be fake while the model is constructed."""

    def prepare(self) -> None:
        self.e = nn.Linear(WIDTH, 512)
        mask = torch.rand(512, WIDTH)
        self.e.weight.register_hook(lambda g: g * mask)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.e(h).mean(1, keepdim=True)


class Accumulated(Base):
    def prepare(self) -> None:
        def clamp(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.clamp_(-1e-3, 1e-3)

        def replace(p: Tensor) -> None:
            assert p.grad is not None
            p.grad = p.grad * 0.5 + 0.01 * p.detach()

        self.a.weight.register_post_accumulate_grad_hook(clamp)
        self.b.weight.register_post_accumulate_grad_hook(replace)


class Tied(Base):
    """One parameter at two places: hooks see the sum of both gradients."""

    def prepare(self) -> None:
        self.b.weight = self.a.weight
        self.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

        def shrink(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.mul_(0.7)

        self.a.weight.register_post_accumulate_grad_hook(shrink)


class ForwardHooks(Base):
    def prepare(self) -> None:
        self.b.register_forward_hook(lambda module, args, out: out * 2)
        self.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class Scaled(Base):
    """Gradient scaling by tensor operations, and gradients that are stopped."""

    def middle(self, h: Tensor) -> Tensor:
        h = h * 0.1 + (h * 0.9).detach()
        with torch.no_grad():
            shift = self.b(h)
        with torch.inference_mode():
            other = self.b(h)
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(h + shift + other.clone() + h.data.mean() + self.b.weight.data.sum())


class Autocast(Base):
    def middle(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(h)
        return h.float()


EQUAL = [
    Masked, RowsZeroed, Normalised, Method, LargeMask, Accumulated, Tied, ForwardHooks, Scaled,
    Autocast,
]  # fmt: skip


@pytest.mark.parametrize("member", every(4, EQUAL), ids=lambda member: member.__name__)
def test_it_is_as_in_plain_pytorch(member: type[Base], tmp_path: Path) -> None:
    """Losses and gradients of three micro-batches, uncut and cut at every legal gap."""
    torch.set_num_threads(1)
    given = batches()
    uncut = captured_model(member, given[0], tmp_path)
    plain = eager_step(member, given)
    for captured in (cut_into(uncut, 1 << 40), cut_everywhere(uncut)):
        assert segment_step(captured, member, given).differences(plain) == []


def on_weight(hook: Callable[..., Any], *, accumulated: bool = False) -> type[Base]:
    """Return a member whose `a.weight` has that hook."""

    class Hooked(Base):
        def prepare(self) -> None:
            if accumulated:

                def behind(p: Tensor) -> None:
                    hook(self, p)

                self.a.weight.register_post_accumulate_grad_hook(behind)
            else:
                self.a.weight.register_hook(lambda g: hook(self, g))

    return Hooked


SEEN: list[float] = []


def counts(model: Base, g: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return g / model.calls


def remembers(model: Base, g: Tensor) -> None:
    SEEN.append(float(g.sum()))


def averages(model: Base, g: Tensor) -> Tensor:
    if not hasattr(model, "mean"):
        model.mean = torch.zeros_like(g)
    model.mean.mul_(0.9).add_(g)
    return model.mean


class SeveralAtOnce(Base):
    def prepare(self) -> None:
        torch.autograd.graph.register_multi_grad_hook(
            (self.a.weight, self.b.weight), lambda grads: None
        )


class ReadsAChangingBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.a.weight.register_hook(lambda g: g * self.ema)

    def middle(self, h: Tensor) -> Tensor:
        self.ema = self.ema + h.detach().mean(0)
        return h


class OnActivation(Base):
    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.1)
        return h


class OnNode(Base):
    def middle(self, h: Tensor) -> Tensor:
        assert h.grad_fn is not None
        h.grad_fn.register_prehook(lambda grads: grads)
        return h


class InTheForward(Base):
    def middle(self, h: Tensor) -> Tensor:
        self.b.weight.register_hook(lambda g: g * 0)
        return h


class OfAModule(Base):
    def prepare(self) -> None:
        self.b.register_full_backward_hook(lambda module, into, out: (into[0] * 0.1,))


class BeforeAModule(Base):
    def prepare(self) -> None:
        self.b.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.1,))


class Offloaded(Base):
    def middle(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return torch.tanh(h)


REFUSED: dict[str, tuple[type[Base], str]] = {
    "counts": (on_weight(counts), r"a\.weight keeps state .*calls"),
    "remembers": (on_weight(remembers), r"a\.weight keeps state"),
    "averages": (on_weight(averages), r"a\.weight (keeps state|writes to)"),
    "draws": (on_weight(lambda m, g: g + torch.randn_like(g)), "draws from torch's generator"),
    "python": (on_weight(lambda m, g: g * random.random()), "draws from Python's random"),
    "other": (on_weight(lambda m, g: g + m.b.weight), "reads a parameter"),
    "double": (on_weight(lambda m, g: g.double()), "makes a gradient of"),
    "raises": (on_weight(lambda m, g: g.reshape(3)), "raised RuntimeError"),
    "steps": (on_weight(lambda m, p: p.data.sub_(p.grad), accumulated=True), "only the optimizer"),
    "none": (on_weight(lambda m, p: setattr(p, "grad", None), accumulated=True), "takes the grad"),
    "several": (SeveralAtOnce, r"parameter a\.weight"),
    "changing": (ReadsAChangingBuffer, "reads the buffer ema"),
    "activation": (OnActivation, r"Tensor.register_hook at .*test_hooks.py:\d+, in middle"),
    "node": (OnNode, r"grad_fn at .*test_hooks.py"),
    "forward": (InTheForward, r"Tensor.register_hook at .*test_hooks.py"),
    "module": (OfAModule, r"module b \(Linear\) has a backward hook.*test_hooks.py"),
    "pre": (BeforeAModule, r"module b \(Linear\) has a backward hook.*test_hooks.py"),
    "offloaded": (Offloaded, r"saved_tensors_hooks at .*test_hooks.py"),
}


@pytest.mark.parametrize("name", every(5, REFUSED))
def test_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """What keeps state, draws, or hangs on what a graph does not have."""
    member, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        captured_model(member, batches()[0], tmp_path)


def test_a_hook_of_all_modules_is_refused(tmp_path: Path) -> None:
    """It would be called behind every module's backward."""
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, into, out: None)
    try:
        with pytest.raises(CaptureError, match="all modules have a backward hook"):
            captured_model(Base, batches()[0], tmp_path)
    finally:
        handle.remove()
