"""Products and decoding that are timed already are left out; their memory is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from swaptrain.compute.known_products import KnownProducts
from swaptrain.models.quantization import decode, encode

MANY_FLOPS = 1 << 40


def learnt(products: KnownProducts, flops: int = MANY_FLOPS) -> tuple[Tensor, ...]:
    """Compute three layers of equal products and one attention; return results and gradients."""
    x = torch.ones(2, 1, 8, 8, requires_grad=True)
    weight = torch.full((8, 8), 0.5, requires_grad=True)
    with products.left_out(flops):
        y = x
        for _ in range(3):
            y = linear(y, weight)
        y = scaled_dot_product_attention(y, y, y)
        torch.autograd.backward(y.sum())
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def forms(tensors: tuple[Tensor, ...]) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def test_what_is_known_is_left_out() -> None:
    """The results have the form of those that are computed; they are zeros, or drawn."""
    products = KnownProducts(enough_s=0.0)
    computed = learnt(KnownProducts())
    first, second = learnt(products), learnt(products)
    assert forms(first) == forms(second) == forms(computed)
    assert all(tensor.any() for tensor in computed)
    assert not any(tensor.any() for tensor in second)
    with products.on_random_numbers():
        assert all(bool(tensor.std() > 0) for tensor in learnt(products))
    assert not any(tensor.any() for tensor in learnt(products))


def test_little_is_computed_whole() -> None:
    """Products that took no time to speak of, and all of a segment with few flops."""
    computed = learnt(KnownProducts())
    for products, flops in ((KnownProducts(), MANY_FLOPS), (KnownProducts(enough_s=0.0), 1 << 20)):
        for _ in range(3):
            assert all(map(torch.equal, learnt(products, flops), computed))
        assert products.left_out_s == 0.0


def test_operations_with_a_body() -> None:
    """A region without gradients has products like any other."""
    weight = torch.ones(4, 4)
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    with KnownProducts(enough_s=0.0).left_out(MANY_FLOPS):
        first, second = (region(False, lambda x: torch.mm(x, x), weight) for _ in range(2))
    assert first.all() and not second.any() and first.shape == second.shape


def test_the_time_of_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the same product before, less what its memory took."""
    now = iter(range(1, 100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    products, weight = KnownProducts(enough_s=1.5), torch.ones(4, 4)
    with products.left_out(MANY_FLOPS):
        for left_out in (0, 0, 1, 2):
            asked = torch.mm(weight, weight)
            assert bool(asked.any()) == (not left_out)
        torch.mm(weight, weight.t())  # of other strides: another kernel
    assert products.left_out_s == 0.0, "each takes one tick, computed or not"


def test_decoding_is_left_out_too() -> None:
    """After the first weight of a shape, in each form."""
    weight = torch.randn(64, 128)
    products = KnownProducts(enough_s=0.0)
    codes, table = torch.empty(4096, dtype=torch.uint8), torch.empty(128)
    encode(weight, "nf4", codes, table)
    expected, target = torch.empty_like(weight), torch.empty_like(weight)
    decode(codes, table, "nf4", expected)
    products.decode(codes, table, "nf4", target)
    assert torch.equal(target, expected)
    products.decode(codes, table, "nf4", target)
    assert not target.any()
    with products.on_random_numbers():
        products.decode(codes, table, "nf4", target)
    assert target.all()
