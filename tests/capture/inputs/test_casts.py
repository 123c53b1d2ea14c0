"""Which floating tensors of a micro-batch a bfloat16 run casts, against what plain PyTorch does."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaptrain.capture.inputs.casts import batch_dtypes, cast_batch, describe_casts
from swaptrain.capture.precision import kept_in_float32
from swaptrain.errors import CaptureError

F32, BF16 = torch.float32, torch.bfloat16


class Priced(nn.Module):
    """A regression whose target is large: 1001 is no bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, price: Tensor) -> Tensor:
        h = self.c(torch.tanh(self.a(x)))
        return (h.float().squeeze(-1) - (price - 1000.0)).pow(2).mean()


class Pixels(nn.Module):
    def __init__(self, transform: bool = False) -> None:
        super().__init__()
        self.c, self.transform = nn.Conv2d(1, 4, 3, padding=1), transform

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.dropout(x.reshape(2, 1, 8, 8) / 16, 0.1)
        if self.transform:
            x = torch.cat([x.flip(-1), x])
        return (self.c(x)[:2].mean((1, 2, 3)) - y).abs().mean()


class Timed(nn.Module):
    """A diffusion step: the time goes through sines before a layer reads it."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.time, self.c, self.cured = nn.Linear(8, 4), nn.Conv2d(4, 4, 3, padding=1), cured

    def forward(self, noisy: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        embedded = torch.cat([angle.sin(), angle.cos()], -1)
        if self.cured:
            embedded = embedded.to(self.time.weight.dtype)
        shift = self.time(embedded)[:, :, None, None]
        return F.mse_loss((self.c(noisy) + shift).float(), noise)


class Promoting(nn.Module):
    """Meets a parameter where float32 goes on in silence, and fails only later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(8)), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(torch.relu(x * self.scale)).float().squeeze(-1) - y).pow(2).mean()


class Elementwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).pow(2).mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.norm(x)).float().squeeze(-1) - y).pow(2).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.lstm(x)[0][:, -1]).float().squeeze(-1) - y).pow(2).mean()


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.up(self.down(x)).float(), x)


class Standardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(x - 1000.0).float().squeeze(-1) - y).pow(2).mean()


class Added(nn.Module):
    """Noise that is added to an activation, and with `denoised` is what the loss compares with."""

    def __init__(self, denoised: bool = False) -> None:
        super().__init__()
        self.first, self.out, self.denoised = nn.Linear(8, 8), nn.Linear(8, 8), denoised

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        found = self.out(torch.relu(self.first(x) + noise)).float()
        return (found - noise if self.denoised else found).pow(2).mean()


class Masked(nn.Module):
    """A float mask beside computed scores: no parameter reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).float().mean()


def lowered(model: nn.Module) -> nn.Module:
    """Return the model with the parameters that a bfloat16 run computes in."""
    kept = kept_in_float32(model)
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.bfloat16()
    return model


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


PRICES = torch.tensor([1001.0, 1003.0])
IMAGES = {"x": numbers(2, 64), "y": PRICES}
CASES = {
    "price": (Priced(), {"x": numbers(2, 8), "price": PRICES}, {"x"}),
    "pixels": (Pixels(), IMAGES, {"x"}),
    "moved": (Pixels(transform=True), IMAGES, {"x"}),
    "times": (
        Timed(cured=True),
        {"noisy": numbers(2, 4, 8, 8), "noise": numbers(2, 4, 8, 8), "t": torch.tensor([999.0, 3])},
        {"noisy"},
    ),
    "promoted": (Promoting(), {"x": numbers(2, 8), "y": PRICES}, {"x"}),
    "elementwise": (Elementwise(), {"x": numbers(2, 8)}, set()),
    "norm": (Normed(), {"x": numbers(2, 8), "y": PRICES}, {"x"}),
    "mask": (Masked(), {"x": numbers(1, 4, 8), "mask": torch.zeros(4, 4)}, {"x"}),
    "added": (Added(), {"x": numbers(2, 8), "noise": numbers(2, 8)}, {"x", "noise"}),
    "lstm": (Recurrent(), {"x": numbers(2, 3, 8), "y": PRICES}, {"x"}),
}


@pytest.mark.parametrize("name", CASES)
def test_only_what_a_parameter_reads_first_is_cast(name: str) -> None:
    """Those keys and no others; then the plain model runs, forward and backward."""
    model, batch, cast = CASES[name]
    model = lowered(model)
    before = {n: p.clone() for n, p in model.named_parameters()}
    generator = torch.get_rng_state()
    dtypes = batch_dtypes(model, batch, BF16)
    assert {key for key, dtype in dtypes.items() if dtype is BF16} == cast
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    model(**cast_batch(batch, dtypes)).backward()
    if cast:  # and without a cast it does not run
        for key in cast:
            with pytest.raises((RuntimeError, ValueError)):
                model(**cast_batch(batch, {**dtypes, key: F32})).backward()


@pytest.mark.parametrize(
    ("model", "batch", "named"),
    [
        (Autoencoder(), {"x": numbers(2, 8)}, "x would be cast"),
        (Timed(cured=False), CASES["times"][1], "computes from t in float32"),
        (Added(True), {"x": numbers(2, 8), "noise": numbers(2, 8)}, "noise would be cast"),
        (Standardised(), {"x": numbers(2, 8), "y": PRICES}, "computes from x in float32"),
    ],
)
def test_what_would_be_rounded_on_the_way_to_something_else_is_refused(
    model: nn.Module, batch: dict[str, Tensor], named: str
) -> None:
    """The keys and the cure are named; casting them would change more than a product."""
    with pytest.raises(CaptureError, match=named) as caught:
        batch_dtypes(lowered(model), batch, BF16)
    assert ".weight.dtype" in str(caught.value)


def test_integers_and_other_floating_dtypes() -> None:
    """float64 becomes float32, in both; float16 is kept unless a product needs it; ids stay."""
    model = lowered(Priced())
    batch = {"x": numbers(2, 8).half(), "price": PRICES.double()}
    assert batch_dtypes(model, batch, BF16) == {"x": BF16, "price": F32}
    kept = {"x": numbers(2, 8).bfloat16(), "price": PRICES.half()}
    assert batch_dtypes(model, kept, BF16) == {"x": BF16, "price": torch.float16}
    mixed = {"x": numbers(2, 8).double(), "ids": torch.tensor([1]), "m": torch.tensor([True])}
    assert batch_dtypes(Priced(), mixed, F32) == {"x": F32, "ids": torch.int64, "m": torch.bool}


def test_the_start_names_the_keys() -> None:
    """What is cast and what stays; without a loss of digits float32 says nothing."""
    batch = {"x": numbers(2, 8), "price": PRICES.double(), "ids": torch.tensor([1])}
    said = describe_casts(batch, {"x": BF16, "price": F32, "ids": torch.int64}, BF16)
    assert said is not None
    assert "x (float32 to bfloat16), price (float64 to float32)" in said
    assert "ids" not in said
    assert describe_casts({"x": numbers(2)}, {"x": F32}, F32) is None
    kept = describe_casts({"x": numbers(2)}, {"x": F32}, BF16)
    assert kept is not None
    assert kept.endswith("as they are: x (float32)")


class Hooked(nn.Module):
    """Registers a hook in its first forward only, as transformers does for hidden states."""

    def __init__(self, noted_in: str) -> None:
        super().__init__()
        self.a, self.noted_in = nn.Linear(8, 1), noted_in
        self.seen: list[Tensor] = []
        self.handles: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.handles and not getattr(self, "hooked", False):
            handle = self.a.register_forward_hook(lambda *call: self.seen.append(call[2]))
            if self.noted_in == "a flag":
                self.hooked = True
            else:
                self.handles.append(handle)
        self.seen.clear()
        self.a(x)
        return torch.stack(self.seen).sum()


@pytest.mark.parametrize("noted_in", ["a flag", "a list"])
def test_hooks_of_a_first_forward_are_registered_once(noted_in: str) -> None:
    """The trial forwards leave neither the hook nor the note that it is there."""
    model, x = Hooked(noted_in).bfloat16(), torch.randn(2, 8)
    dtypes = batch_dtypes(model, {"x": x}, BF16)
    assert dtypes == {"x": BF16}
    assert not model.a._forward_hooks and not model.seen and not model.handles
    model(x.bfloat16())
    assert len(model.seen) == 1


class Asking(nn.Module):
    """Looks at its labels in Python before it reads what has to be cast."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 4:
            raise ValueError("a label is too large")
        return F.cross_entropy(self.a(x).float(), labels)


def test_a_forward_that_reads_its_batch_in_python_is_followed() -> None:
    """The answers are the micro-batch's own, as while a model is captured."""
    batch = {"x": torch.randn(2, 8), "labels": torch.tensor([1, 3])}
    assert batch_dtypes(Asking().bfloat16(), batch, BF16)["x"] is BF16
