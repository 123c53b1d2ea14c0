"""State that a forward assigns: as in plain PyTorch, over micro-batches and cuts, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

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


class Buffered(Base):
    """Has a buffer `ema`."""

    def prepare(self) -> None:
        self.register_buffer("ema", torch.zeros(WIDTH))


class Assigned(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        return h * (1 + self.ema)  # autograd saves the new one


class SavedOld(Buffered):
    """Autograd saves the tensor that is replaced afterwards."""

    def middle(self, h: Tensor) -> Tensor:
        out = h * (1 + self.ema)
        self.ema = self.ema + h.detach().mean(0)
        return out


class NotPersistent(Base):
    middle = Assigned.middle

    def prepare(self) -> None:
        self.register_buffer("ema", torch.zeros(WIDTH), persistent=False)


class Submodule(Base):
    def prepare(self) -> None:
        self.b.register_buffer("count", torch.zeros(()))

    def middle(self, h: Tensor) -> Tensor:
        self.b.count = self.b.count + 1
        return h * self.b.count


class RegisteredAgain(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.register_buffer("ema", self.ema * 0.5 + h.detach().mean(0))
        return h - self.ema


class SetAttribute(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        for name in ("ema",):
            setattr(self, name, getattr(self, name) + h.detach().amax(0))
        return h - self.ema


class ByDict(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self._buffers["ema"] = self._buffers["ema"] * 0.5 + h.detach().mean(0)
        return h - self.ema


class WhileTraining(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.ema = torch.lerp(self.ema, h.mean(0), 0.1)
        return h - self.ema


class InPlaceToo(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.ema.mul_(0.5)
        self.ema = self.ema + h.detach().mean(0)
        self.ema.add_(0.25)
        return h - self.ema


class Places(Base):
    """Two buffers change places, and one of them is new."""

    def prepare(self) -> None:
        self.register_buffer("old", torch.zeros(WIDTH))
        self.register_buffer("new", torch.ones(WIDTH))

    def middle(self, h: Tensor) -> Tensor:
        self.old, self.new = self.new, self.old
        self.new = self.new + h.detach().mean(0)
        return h + self.old - self.new


class Exchanged(Places):
    def middle(self, h: Tensor) -> Tensor:
        self.old, self.new = self.new, self.old
        return h + self.old - 2 * self.new


class NeverRead(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.ema = h[0].detach() * 1.0
        return h


class WithGradientNeverRead(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.ema = h.mean(0)
        return h - self.ema


class PlainAssigned(Base):
    middle = Assigned.middle

    def prepare(self) -> None:
        self.ema = torch.zeros(WIDTH)


class PlainInPlace(Base):
    def prepare(self) -> None:
        self.ema = torch.zeros(WIDTH)

    def middle(self, h: Tensor) -> Tensor:
        self.ema.mul_(0.9).add_(h.detach().mean(0))
        return h - self.ema


class Passed(Base):
    """An attribute that carries a term of the loss from one layer to another."""

    def prepare(self) -> None:
        self.term = torch.tensor(0.0)
        self.other = None
        self.terms: list[Tensor] = []

    def middle(self, h: Tensor) -> Tensor:
        self.terms.clear()
        self.terms.append(h.pow(2).mean())
        self.term, self.other = h.mean(), h.abs().mean()
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        assert isinstance(self.other, Tensor)
        return loss + 0.1 * self.term + 0.1 * self.other + self.terms[0]


class CachedTables(Base):
    """What a first forward makes of constants, in an attribute, a dict and a buffer."""

    def prepare(self) -> None:
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.rows: int | None = None

    def middle(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH) * 0.1
        if len(h) not in self.tables:
            self.tables[len(h)] = torch.arange(len(h)).unsqueeze(1) * 0.5
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(WIDTH), persistent=False)
        self.rows = len(h)
        return h * self.table + self.tables[self.rows] + self.late


class FreshEachTime(Base):
    def middle(self, h: Tensor) -> Tensor:
        t = torch.tensor([1.0] * WIDTH)
        t += h.detach().mean(0)
        return h * t.mul_(2)


class WeightNorm(Base):
    def prepare(self) -> None:
        self.b = nn.utils.parametrizations.weight_norm(self.b)
        self.a = nn.utils.parametrizations.spectral_norm(self.a)


class OldWeightNorm(Base):
    def prepare(self) -> None:
        self.b = torch.nn.utils.weight_norm(self.b)  # type: ignore[no-untyped-call]


class TwoPlaces(Base):
    """A batch norm that is also in a list, whose forward runs by its second name."""

    def prepare(self) -> None:
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.all = torch.nn.Sequential(self.norm, torch.nn.Tanh())

    def middle(self, h: Tensor) -> Tensor:
        result: Tensor = self.all(h)
        return result


class TwoNames(Base):
    def prepare(self) -> None:
        self.register_buffer("first", torch.ones(WIDTH))
        self.register_buffer("second", self.first)

    def middle(self, h: Tensor) -> Tensor:
        assert isinstance(self.first, Tensor) and isinstance(self.second, Tensor)
        self.second.mul_(0.9)
        return h * self.first


class Halves(Base):
    def prepare(self) -> None:
        both = torch.ones(2 * WIDTH)
        self.register_buffer("first", both[:WIDTH])
        self.register_buffer("second", both[WIDTH:])

    def middle(self, h: Tensor) -> Tensor:
        assert isinstance(self.first, Tensor) and isinstance(self.second, Tensor)
        self.second.mul_(0.9)
        return h * self.first * self.second


class SeenByAnother(Base):
    """A buffer is changed, and read as another tensor on its memory."""

    def prepare(self) -> None:
        self.register_buffer("first", torch.ones(WIDTH))
        assert isinstance(self.first, Tensor)
        self.seen = self.first.view(4, 4)

    def middle(self, h: Tensor) -> Tensor:
        assert isinstance(self.first, Tensor)
        self.first.mul_(0.9)
        return h * self.seen.flatten()


class PartOfAnother(Halves):
    def prepare(self) -> None:
        self.register_buffer("first", torch.ones(WIDTH))
        assert isinstance(self.first, Tensor)
        self.register_buffer("second", self.first[:1])


class Parts(TwoNames):
    def middle(self, h: Tensor) -> Tensor:
        self.second = self.second * 0.9
        assert isinstance(self.first, Tensor)
        return h * self.first


EQUAL = [
    Assigned, SavedOld, NotPersistent, Submodule, RegisteredAgain, SetAttribute, ByDict,
    WhileTraining, InPlaceToo, Places, Exchanged, NeverRead, WithGradientNeverRead, PlainAssigned,
    PlainInPlace, Passed, CachedTables, FreshEachTime, WeightNorm, OldWeightNorm,
    TwoPlaces, TwoNames, Halves,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("member", every(5, EQUAL), ids=lambda member: member.__name__)
def test_it_is_as_in_plain_pytorch(member: type[Base], tmp_path: Path) -> None:
    """Losses, gradients and buffers of three micro-batches, uncut and cut at every legal gap."""
    torch.set_num_threads(1)
    given = batches()
    uncut = captured_model(member, given[0], tmp_path)
    plain = eager_step(member, given)
    for captured in (cut_into(uncut, 1 << 40), cut_everywhere(uncut)):
        result = segment_step(captured, member, given)
        assert result.differences(plain) == []
        initial = dict(member().named_buffers())
        changed = [n for n, b in initial.items() if not torch.equal(b, plain.buffers[n])]
        assert set(changed) <= result.buffers.keys()


class OtherShape(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.ema = torch.cat([self.ema, h.detach().mean(0)])
        return h


class OtherType(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.ema = (self.ema + h.detach().mean(0)).double()
        return h


class WithGradient(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + h.mean(0)
        return h - self.ema


class OfAParameter(Buffered):
    def middle(self, h: Tensor) -> Tensor:
        out = h - self.ema
        self.ema = self.b.bias.detach()
        return out


class OneMemory(Places):
    def middle(self, h: Tensor) -> Tensor:
        self.old = self.new = self.new + h.detach().mean(0)
        return h - self.old


class OfFirstBatch(Base):
    """What data-dependent initialisation does: the first micro-batch decides for ever."""

    def prepare(self) -> None:
        self.mean: Tensor | None = None

    def middle(self, h: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = h.detach().mean(0)
        return h - self.mean


class InADict(Base):
    def prepare(self) -> None:
        self.averages = {"h": torch.zeros(WIDTH)}

    def middle(self, h: Tensor) -> Tensor:
        self.averages["h"] = self.averages["h"] * 0.9 + h.detach().mean(0)
        return h - self.averages["h"]


class InAnObject(Base):
    def prepare(self) -> None:
        self.state = SimpleNamespace(mean=torch.zeros(WIDTH))

    def middle(self, h: Tensor) -> Tensor:
        self.state.mean = self.state.mean * 0.9 + h.detach().mean(0)
        return h - self.state.mean


OUTSIDE = torch.zeros(WIDTH)


class OutsideInPlace(Base):
    def middle(self, h: Tensor) -> Tensor:
        OUTSIDE.mul_(0.9).add_(h.detach().mean(0))
        return h - OUTSIDE


REFUSED = [
    (SeenByAnother, r"(seen lies in the memory of the buffer first|first .* of the buffer seen)"),
    (PartOfAnother, "first lies in the memory of the buffer second, which the forward changes"),
    (Parts, "assigns a tensor to second, which was one buffer with first"),
    (OtherShape, "ema.*shape and dtype"),
    (OtherType, "ema.*shape and dtype"),
    (WithGradient, r"ema.*detach\(\)"),
    (OfAParameter, r"b\.bias to ema.*clone"),
    (OneMemory, r"one memory to (old and new|new and old)"),
    (OfFirstBatch, "second forward computes something else than the first, which sets mean"),
    (InADict, r"averages.*Register"),
    (InAnObject, r"state.mean.*Register"),
    (OutsideInPlace, "OUTSIDE.*register"),
]


@pytest.mark.parametrize(
    ("member", "message"), every(4, REFUSED), ids=lambda v: getattr(v, "__name__", "")
)
def test_it_is_refused_by_name(member: type[Base], message: str, tmp_path: Path) -> None:
    """What plain PyTorch does with it cannot be had, or would fail there as well."""
    with pytest.raises(CaptureError, match=message):
        captured_model(member, batches()[0], tmp_path)
