"""What else a forward does outside of the graph: Python state, draws, writes, gradients."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaptrain.errors import CaptureError
from tests.capture.guards.members import WIDTH, Base, batches
from tests.capture.in_memory import captured_model, cut_into, eager_step, segment_step
from tests.support.matrix import every

pytestmark = pytest.mark.trains

COUNT = 0


@dataclasses.dataclass
class Meter:
    """An object that hangs on a module."""

    total: float = 0.0
    parts: dict[str, list[int]] = dataclasses.field(default_factory=lambda: {"n": [0]})


class InAList(Base):
    def prepare(self) -> None:
        self.calls = [0]

    def middle(self, h: Tensor) -> Tensor:
        self.calls[0] += 1
        return h * self.calls[0]


class InACounter(Base):
    def prepare(self) -> None:
        self.calls = collections.Counter()

    def middle(self, h: Tensor) -> Tensor:
        self.calls["n"] += 1
        return h / self.calls["n"]


class InADeque(Base):
    def prepare(self) -> None:
        self.last = collections.deque([1.0, 2.0, 3.0], maxlen=3)

    def middle(self, h: Tensor) -> Tensor:
        self.last.append(self.last[-1] + 1)
        return h * self.last[0]


class InASet(Base):
    def prepare(self) -> None:
        self.seen: set[int] = set()

    def middle(self, h: Tensor) -> Tensor:
        self.seen.add(len(self.seen))
        return h * len(self.seen)


class InAnObject(Base):
    def prepare(self) -> None:
        self.meter = Meter()

    def middle(self, h: Tensor) -> Tensor:
        self.meter.parts["n"][0] += 1
        return h * self.meter.parts["n"][0]


class OnTheClass(Base):
    calls = 0

    def middle(self, h: Tensor) -> Tensor:
        type(self).calls += 1
        return h * type(self).calls


class InTheModule(Base):
    def middle(self, h: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return h * COUNT


def counted() -> object:
    calls = 0

    def scale(h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return h * calls

    return scale


class InAClosure(Base):
    def prepare(self) -> None:
        self.scale = counted()

    def middle(self, h: Tensor) -> Tensor:
        assert callable(self.scale)
        result: Tensor = self.scale(h)
        return result


class Iterated(Base):
    def prepare(self) -> None:
        self.numbers = itertools.count(1)

    def middle(self, h: Tensor) -> Tensor:
        return h * next(self.numbers)


def powers() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 0.5


class Generated(Base):
    def prepare(self) -> None:
        self.powers = powers()

    def middle(self, h: Tensor) -> Tensor:
        return h * next(self.powers)


def scaled(h: Tensor) -> Tensor:
    scaled.calls = getattr(scaled, "calls", 0) + 1  # type: ignore[attr-defined]
    return h * scaled.calls  # type: ignore[attr-defined, no-any-return]


class OnAFunction(Base):
    def middle(self, h: Tensor) -> Tensor:
        return scaled(h)


class Alternates(Base):
    flip = False

    def middle(self, h: Tensor) -> Tensor:
        self.flip = not self.flip
        return h if self.flip else -h


class WarmUp(Base):
    """The first forward computes something else than all others."""

    warm = False

    def middle(self, h: Tensor) -> Tensor:
        if not self.warm:
            self.warm = True
            return h * 0
        return h


class InAHook(Base):
    def prepare(self) -> None:
        calls = [0]

        def hook(module: nn.Module, args: object, out: Tensor) -> Tensor:
            calls[0] += 1
            return out * calls[0]

        self.b.register_forward_hook(hook)


class NumpyMask(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.from_numpy((np.random.rand(WIDTH) > 0.5).astype("float32"))


class PythonBranch(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h if random.random() < 0.5 else h * 0.1


class OwnGenerator(Base):
    def prepare(self) -> None:
        self.rng = np.random.default_rng(1)

    def middle(self, h: Tensor) -> Tensor:
        return h * float(self.rng.random())


class NewGenerator(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * float(np.random.default_rng().random())


class NewState(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * float(np.random.RandomState().rand())


class NewRandom(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * random.Random().random()


class OwnRandom(Base):
    def prepare(self) -> None:
        self.rng = random.Random(1)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.rng.random()


class TorchGenerator(Base):
    def prepare(self) -> None:
        self.rng = torch.Generator().manual_seed(1)

    def middle(self, h: Tensor) -> Tensor:
        return h * torch.rand(WIDTH, generator=self.rng)


class Seeded(Base):
    def middle(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return h * torch.rand(WIDTH)


class ByTime(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * (time.time() % 7)


class WritesData(Base):
    def middle(self, h: Tensor) -> Tensor:
        self.b.weight.data.clamp_(-0.1, 0.1)
        return h


class SetsData(Base):
    def middle(self, h: Tensor) -> Tensor:
        self.b.weight.data = self.b.weight.data * 0.5
        return h


class WritesActivationData(Base):
    def middle(self, h: Tensor) -> Tensor:
        h.data[:, 0] = 0
        return h


class WritesAView(Base):
    def middle(self, h: Tensor) -> Tensor:
        h.data[0].zero_()
        return h


class CopiesIntoWeight(Base):
    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight)
        return h


class InitialisesWeight(Base):
    def middle(self, h: Tensor) -> Tensor:
        nn.init.ones_(self.b.weight)
        return h


class MaxNorm(Base):
    def prepare(self) -> None:
        self.e = nn.Embedding(8, WIDTH, max_norm=1.0)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.e(torch.arange(4))


class Foreach(Base):
    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_mul_([self.b.weight], 0.5)
        return h


class Freezes(Base):
    def middle(self, h: Tensor) -> Tensor:
        self.b.weight.requires_grad_(False)
        return h


class GradientPenalty(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        z = self.c(torch.tanh(self.a(x)))
        (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return F.cross_entropy(z, y) + g.pow(2).mean()


class Backward(Base):
    def middle(self, h: Tensor) -> Tensor:
        h.sum().backward(retain_graph=True)
        return h


class FunctionalGradient(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h + torch.func.grad(lambda t: t.pow(2).sum())(h)


class Jacobian(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h + torch.func.jacrev(lambda t: t.sin().sum(0))(h).sum()


class Hessian(Base):
    def middle(self, h: Tensor) -> Tensor:
        _, product = torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))
        return h + product


class Deterministic(Base):
    def middle(self, h: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        return h


class ReadsGradient(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h if self.a.weight.grad is None else h * 0.5


class DropsGradient(Base):
    def middle(self, h: Tensor) -> Tensor:
        self.a.weight.grad = None
        return h


class ByProcess(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * (1 + os.getpid() % 7)


class ViewOfAParameter(Base):
    def prepare(self) -> None:
        self.first = self.a.weight[:8]

    def middle(self, h: Tensor) -> Tensor:
        return h + F.linear(h, self.first).sum(-1, keepdim=True)


class ReturnsAParameter(Base):
    def prepare(self) -> None:
        self.loss = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss


STATE = "the forward changes Python state: .*"
REFUSED: dict[type[Base], str] = {
    InAList: STATE + r"self\.calls\[0\] \(1 -> 2\)",
    InACounter: STATE + r"calls\['n'\]",
    InADeque: STATE + r"self\.last\[",
    InASet: STATE + r"self\.seen",
    InAnObject: STATE + r"self\.meter\.parts\['n'\]\[0\]",
    OnTheClass: STATE + r"OnTheClass\.calls",
    InTheModule: STATE + r"test_forward\.COUNT",
    InAClosure: STATE + r"self\.scale\.<calls>",
    Iterated: STATE + r"self\.numbers",
    Generated: STATE + r"self\.powers",
    OnAFunction: STATE + r"scaled\.calls",
    Alternates: STATE + r"self\.flip",
    WarmUp: r"second forward computes something else than the first, which sets self\.warm",
    InAHook: STATE + r"forward hook>\.<calls>\[0\]",
    NumpyMask: r"draws from numpy.random: rand at .*test_forward.py:\d+, in middle.*torch.rand",
    PythonBranch: r"draws from Python's random: random at .*test_forward.py",
    OwnGenerator: STATE + r"self\.rng",
    NewGenerator: r"default_rng at .*test_forward.py",
    NewState: r"RandomState at .*test_forward.py",
    NewRandom: r"random.Random at .*test_forward.py",
    OwnRandom: STATE + r"self\.rng",
    TorchGenerator: r"generator of its own at|a generator of its own .*test_forward.py",
    Seeded: r"torch.manual_seed at .*test_forward.py",
    ByTime: r"depends on the time \(time.time at .*test_forward.py",
    WritesData: r"tensor.data.clamp_` at .*test_forward.py",
    SetsData: r"tensor.data = ...` at .*test_forward.py",
    WritesActivationData: r"tensor.data.__setitem__` at .*test_forward.py",
    WritesAView: r"tensor.data.zero_` at .*test_forward.py",
    CopiesIntoWeight: r"writes to the parameter b\.weight",
    InitialisesWeight: r"writes to the parameter b\.weight",
    MaxNorm: r"writes to the parameter e\.weight",
    Foreach: r"_foreach_mul_ at .*test_forward.py",
    Freezes: "requires_grad of a parameter",
    GradientPenalty: r"torch.autograd.grad at .*test_forward.py:\d+, in forward",
    Backward: r"Tensor.backward\(\) at .*test_forward.py",
    FunctionalGradient: r"torch.func.grad at .*test_forward.py",
    Jacobian: r"torch.func.vjp or jacrev at .*test_forward.py",
    Hessian: r"torch.func.jvp or jacfwd at .*test_forward.py",
    ReadsGradient: r"Tensor.grad at .*test_forward.py:\d+, in middle",
    DropsGradient: r"Tensor.grad at .*test_forward.py",
    ByProcess: r"getpid at .*test_forward.py",
    ViewOfAParameter: "(?s)first was computed from a parameter when the model was built",
    ReturnsAParameter: "returns a parameter itself as its loss",
    Deterministic: "use_deterministic_algorithms",
}


@pytest.mark.parametrize("member", every(5, REFUSED), ids=lambda member: member.__name__)
def test_it_is_refused_by_name(member: type[Base], tmp_path: Path) -> None:
    """The message has the attribute or the line."""
    with pytest.raises(CaptureError, match=REFUSED[member]):
        try:
            captured_model(member, batches()[0], tmp_path)
        finally:
            torch.use_deterministic_algorithms(False)


@functools.lru_cache
def ones(width: int) -> int:
    return width


class Harmless(Base):
    """Remembers what every forward sets alike, looks at the clock, and draws from a fixed seed."""

    def prepare(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rows: list[int] = []

    def middle(self, h: Tensor) -> Tensor:
        began = time.perf_counter()
        self.shapes["h"] = tuple(h.shape)
        self.rows = [len(h)] * ones(WIDTH)
        fixed = np.random.default_rng(3).random(WIDTH).astype("float32")
        torch.set_default_dtype(torch.float64)
        try:
            table = torch.ones(WIDTH)
        finally:
            torch.set_default_dtype(torch.float32)
        print("seconds", time.perf_counter() - began)
        return (h * table).float() * torch.from_numpy(fixed) * random.Random(2).random()


def test_what_every_forward_does_alike_is_accepted(tmp_path: Path) -> None:
    """Numbers of plain PyTorch."""
    torch.set_num_threads(1)
    given = batches()
    captured = cut_into(captured_model(Harmless, given[0], tmp_path), 1 << 40)
    assert segment_step(captured, Harmless, given).differences(eager_step(Harmless, given)) == []
