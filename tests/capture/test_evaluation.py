"""The model in evaluation mode has a graph of its own, with the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from swaptrain.capture.evaluation.mode import evaluating
from swaptrain.errors import CaptureError
from tests.capture.in_memory import (
    captured_with_evaluation,
    cut_everywhere,
    cut_into,
    eager_losses,
    segment_losses,
)
from tests.support.matrix import every

pytestmark = pytest.mark.trains

D = 16
Batch = dict[str, Tensor]


def batches(*sizes: int) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(size, 6, D, generator=g),
            "y": torch.randint(0, 4, (size,), generator=g),
        }
        for size in sizes
    ]


class Base(nn.Module):
    """[B, T, D] and a class; what is between two layers is another model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 4)

    def mid(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.mid(torch.tanh(self.a(x)))
        return F.cross_entropy(self.c(torch.tanh(self.b(h)).mean(1)), y)


class DropPath(Base):
    def mid(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        return h * torch.rand(len(h), 1, 1).add(0.5).floor() / 0.5


class Noise(Base):
    def mid(self, h: Tensor) -> Tensor:
        return h + torch.randn_like(h) if self.training else h


class GaussianDropout(Base):
    def mid(self, h: Tensor) -> Tensor:
        return h * (1 + 0.5 * torch.randn_like(h)) if self.training else h


class TrainingTerm(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss + 10 * self.a.weight.pow(2).sum() if self.training else loss


class EvaluationBranch(Base):
    """A layer that training never reads, and another order of those that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            return super().forward(x, y)
        h = self.only(self.b(torch.tanh(self.a(self.b(x)))))
        return F.cross_entropy(self.c(h.mean(1)), y)


class LayerDrop(Base):
    """Drops a layer by torch's generator, as a mask on its result."""

    def mid(self, h: Tensor) -> Tensor:
        out = self.b(h)
        return h + out * (torch.rand(()) > 0.3) if self.training else h + out


class Functional(Base):
    def mid(self, h: Tensor) -> Tensor:
        return F.alpha_dropout(F.dropout(h, 0.4, self.training), 0.3, self.training)


class Norms(Base):
    """Instance and batch norms with running statistics, and without."""

    def __init__(self) -> None:
        super().__init__()
        self.instance = nn.InstanceNorm1d(6, track_running_stats=True, affine=True)
        self.batch = nn.BatchNorm1d(6)
        self.without = nn.BatchNorm1d(6, track_running_stats=False)

    def mid(self, h: Tensor) -> Tensor:
        return self.without(self.batch(self.instance(h)))


class FrozenNorm(Base):
    """Keeps its batch norm in evaluation mode, also while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def mid(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Spectral(Base):
    """Its power iteration runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.b = parametrizations.spectral_norm(self.b)


class OldSpectral(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.utils.spectral_norm(self.b)


class Attention(Base):
    """Takes the fused operation in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True)

    def mid(self, h: Tensor) -> Tensor:
        return h + self.attention(h, h, h, need_weights=False)[0]


class Encoder(Base):
    """One operation has all weights of a layer, among which training is cut."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def mid(self, h: Tensor) -> Tensor:
        return self.encoder(h)


class StillEncoder(Encoder):
    """Without dropout, so that plain PyTorch takes the same steps."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
            elif isinstance(each, nn.MultiheadAttention):
                each.dropout = 0.0


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, 2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(D, D, batch_first=True)

    def mid(self, h: Tensor) -> Tensor:
        return self.gru(self.lstm(h)[0])[0]


class Average(Base):
    """Evaluates with a moving average of its own weight, which training changes."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(D, D))

    def mid(self, h: Tensor) -> Tensor:
        if not self.training:
            return F.linear(h, self.average * 1.0)
        with torch.no_grad():
            self.average.mul_(0.5).add_(self.b.weight, alpha=0.5)
        return h


class Counter(Base):
    """Counts every forward, and reads the count in training only."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def mid(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1 + self.calls) if self.training else h


class InPlace(Base):
    def mid(self, h: Tensor) -> Tensor:
        h = self.b(h) * 2
        part = h[:, :3]
        part += 1
        return F.dropout(h, 0.5, self.training, inplace=True)


class Mutual(Base):
    """Adversarial: the loss of one mode is the other's, with the same layers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss - 0.1 * self.c(self.b(x)).mean() if self.training else -loss


MEMBERS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(DropPath, Noise, GaussianDropout, TrainingTerm, EvaluationBranch, LayerDrop, Functional),
        *(Norms, FrozenNorm, Spectral, OldSpectral, Attention, Encoder, Recurrent, Average),
        *(Counter, InPlace, Mutual),
    )
}


def stepped(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return a module that has trained for two steps, so that its buffers are no first values."""
    torch.manual_seed(0)
    module = factory().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in batches(3, 3):
        module(**batch).backward()
        optimizer.step()
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are split by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", every(4, MEMBERS))
def test_a_loss_in_evaluation_mode_has_the_bits_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    """Uncut and cut wherever training may be, for batches of two sizes, with trained buffers."""
    held_out = batches(3, 2)
    uncut, evaluations = captured_with_evaluation(MEMBERS[name], held_out, tmp_path)
    module = stepped(MEMBERS[name])
    expected = eager_losses(module, held_out)
    pieces = cut_everywhere(uncut)
    assert len(pieces.model.segments) > 3
    assert segment_losses(cut_into(uncut, 1 << 40), evaluations, module, held_out) == expected
    assert segment_losses(pieces, evaluations, module, held_out) == expected


def test_the_training_form_would_not_pass() -> None:
    """What these members give in training mode is another number: the tests can fail."""
    for name, factory in MEMBERS.items():
        module = stepped(factory)
        (expected,) = eager_losses(module, batches(3))
        module.train()
        torch.manual_seed(3)  # LayerDrop drops
        if name != "FrozenNorm":
            assert float(module(**batches(3)[0]).detach()) != expected, name


class Structure(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) if self.training else {"classes": self.c(x).argmax(-1)}


class NoScalar(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) if self.training else self.c(x)


class ReadsValues(Base):
    def mid(self, h: Tensor) -> Tensor:
        return h if self.training or h.sum() > 0 else -h


class Chained(Base):
    """Each batch in evaluation mode changes what the next one reads."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def mid(self, h: Tensor) -> Tensor:
        if not self.training:
            self.seen += 1
            return h * self.seen
        return h


class Counts(Base):
    evaluations = 0

    def mid(self, h: Tensor) -> Tensor:
        if not self.training:
            self.evaluations = self.evaluations + 1
        return h


class Constant(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) if self.training else torch.zeros(())


class Padded(Encoder):
    """torch makes nested tensors of a padding mask in evaluation mode."""

    def mid(self, h: Tensor) -> Tensor:
        mask = torch.zeros(h.shape[:2], dtype=torch.bool)
        return self.encoder(h, src_key_padding_mask=mask)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another structure": (Structure, "evaluation mode .* not a loss"),
    "no scalar": (NoScalar, "evaluation mode .* shape"),
    "values": (ReadsValues, "evaluation mode .*test_evaluation.py"),
    "chained": (Chained, "changes seen .* the next"),
    "counter": (Counts, "Python state.*evaluations"),
    "constant": (Constant, "neither on the batch nor on a parameter"),
    "nested": (Padded, "enable_nested_tensor=False"),
}


@pytest.mark.parametrize("name", every(3, REFUSED))
def test_what_cannot_be_evaluated_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """It names the mode, the model and the way out; training alone is captured."""
    factory, message = REFUSED[name]
    with pytest.raises(CaptureError, match=f"(?s)eval: .*{message}.*eval=null"):
        captured_with_evaluation(factory, batches(3), tmp_path)


def test_the_module_is_left_as_it_was() -> None:
    """Modes, attributes and buffers that an evaluation assigns are taken back, one by one."""
    module = FrozenNorm().train()
    module.register_buffer("kept", torch.zeros(2))
    kept = module.kept
    before = {name: each.training for name, each in module.named_modules()}
    assert before["norm"] is False and before["a"] is True
    with evaluating(module):
        assert not any(each.training for each in module.modules())
        module.last, module.kept = 3, torch.ones(2)
    assert {name: each.training for name, each in module.named_modules()} == before
    assert module.kept is kept and not hasattr(module, "last")
