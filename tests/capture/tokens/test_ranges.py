"""What regions and heads compute over ranges: the forward's bits, and sums of gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from swaptrain.capture.capture import capture, cut
from swaptrain.capture.captured import Captured
from swaptrain.capture.cut import CutLimits
from swaptrain.capture.init.construct import construct
from swaptrain.capture.tokens.head import HeadLoss
from swaptrain.capture.tokens.ranges import TokenRanges
from swaptrain.capture.tokens.rewriting import has_ranges
from swaptrain.capture.uncut import Uncut
from swaptrain.program.model import ParameterSpec
from tests.capture.in_memory import StepResult, segment_step
from tests.capture.tokens.test_regions import MODELS, language_model, sequences
from tests.support.matrix import proof_but

TOKENS = 20
IGNORED = -100
CASES = [(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16")]


def captured_in(name: str, dtype: torch.dtype, tmp_path: Path) -> Uncut:
    construction = construct(partial(language_model, name, dtype), seed=0, scratch_dir=tmp_path)
    module = construction.module
    masters = {n: "float32" for n, _ in module.named_parameters()}
    return capture(module, construction.fake_mode, sequences(), masters)


def divided(uncut: Uncut, target_bytes: int, tokens: int | None, *, skip: bool = False) -> Captured:
    def nbytes(parameter: ParameterSpec) -> int:
        return parameter.tensor.nbytes

    limits = CutLimits(target_bytes, 2 * target_bytes, 1 << 40, 2)
    captured, _ = cut(
        uncut,
        limits,
        state_bytes=nbytes,
        working_bytes=nbytes,
        skip_ignored=skip,
        tokens=tokens,
    )
    return captured


def assert_close(found: StepResult, expected: StepResult, tolerance: float) -> None:
    """Assert that gradients differ by rounding, relative to the largest element of each."""
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        gap = (found.gradients[name].float() - gradient.float()).abs().max()
        assert gap <= tolerance * gradient.float().abs().max(), name


@pytest.mark.parametrize(
    ("name", "dtype"),
    proof_but(
        CASES,
        ("llama", "float32"),
        ("gpt2", "bfloat16"),
        whole=[c for c in CASES if c not in (("llama", "float32"), ("gpt2", "bfloat16"))],
    ),
)
def test_the_forward_has_the_bits_of_the_whole(name: str, dtype: str, tmp_path: Path) -> None:
    """Gradients are those of the whole within rounding, and the same bits for other cuts."""
    of = getattr(torch, dtype)
    uncut = captured_in(name, of, tmp_path)
    factory, batches = partial(language_model, name, of), [sequences(seed=i) for i in range(2)]
    plain = segment_step(divided(uncut, 1 << 40, None), factory, batches)
    one, many = divided(uncut, 1 << 40, TOKENS), divided(uncut, 1000, TOKENS)
    assert len(one.model.segments) == 1 and len(many.model.segments) > 4
    assert has_ranges(code.train for code in one.codes)
    found = segment_step(one, factory, batches)
    assert found.losses == plain.losses
    assert plain.differences(found), "sums of weights' gradients have another order"
    assert_close(found, plain, 1e-5 if dtype == "float32" else 0.03)
    assert segment_step(many, factory, batches).differences(found) == []


def test_ignored_rows_are_left_out_of_the_head_first(tmp_path: Path) -> None:
    uncut = captured_in("llama", torch.float32, tmp_path)
    factory, batch = partial(language_model, "llama"), sequences()
    batch["labels"][:, :7] = IGNORED
    plain = segment_step(divided(uncut, 1 << 40, None), factory, [batch])
    found = segment_step(divided(uncut, 1 << 40, TOKENS, skip=True), factory, [batch])
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    assert_close(found, plain, 1e-5)


def two_layers() -> fx.Graph:
    """The body of an MLP of rows and two weights."""
    graph = fx.Graph()
    x, first, last = (graph.placeholder(name) for name in ("x", "first", "last"))
    wide = graph.call_function(torch.ops.aten.linear.default, (x, first))
    wide = graph.call_function(torch.ops.aten.silu.default, (wide,))
    graph.output(graph.call_function(torch.ops.aten.linear.default, (wide, last)))
    return graph


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def test_gradients_of_weights_are_summed_in_float32() -> None:
    """Of each range as it comes, in bfloat16, and rounded once; those of rows are not summed."""
    x, first, last = numbers(2, 25, 8, seed=0), numbers(32, 8, seed=1), numbers(8, 32, seed=2)
    given = numbers(2, 25, 8, seed=3).detach()
    out = TokenRanges(two_layers(), 16, count=50, row_inputs=1, shape=(2, 25, 8))(x, first, last)
    out.backward(given)
    sums = {"first": torch.zeros(32, 8), "last": torch.zeros(8, 32)}
    for rows, gradient in zip(
        x.detach().view(50, 8).split(16), given.view(50, 8).split(16), strict=True
    ):
        leaves = [tensor.detach().requires_grad_() for tensor in (rows, first, last)]
        made = F.linear(F.silu(F.linear(leaves[0], leaves[1])), leaves[2])
        made.backward(gradient)
        for total, leaf in zip(sums.values(), leaves[1:], strict=True):
            assert leaf.grad is not None
            total += leaf.grad
    assert first.grad is not None and last.grad is not None and x.grad is not None
    assert torch.equal(first.grad, sums["first"].bfloat16())
    assert torch.equal(last.grad, sums["last"].bfloat16())
    of_rows = x.grad.clone()
    x.grad = None
    F.linear(F.silu(F.linear(x, first)), last).backward(given)
    assert torch.equal(of_rows, x.grad)


def test_frozen_weights_get_no_gradient() -> None:
    """And rows that nothing below learns from."""
    x, first, last = numbers(30, 8, seed=0), numbers(32, 8, seed=1), numbers(8, 32, seed=2)
    first.requires_grad_(False)
    x.requires_grad_(False)
    region = TokenRanges(two_layers(), 16, count=30, row_inputs=1, shape=(30, 8))
    region(x, first, last).sum().backward()
    assert first.grad is None and x.grad is None and last.grad is not None


def linear() -> fx.Graph:
    """The body of a head."""
    graph = fx.Graph()
    hidden, weight = graph.placeholder("hidden"), graph.placeholder("weight")
    graph.output(graph.call_function(torch.ops.aten.linear.default, (hidden, weight)))
    return graph


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("ignored", [0, 9, 50])
def test_a_head_has_the_loss_of_all_its_logits(reduction: int, ignored: int) -> None:
    """The mean or the sum of rows, some or all of them ignored; logits exist a range at a time."""
    hidden, weight = numbers(2, 25, 8, seed=0), numbers(40, 8, seed=1)
    targets = torch.randint(40, (50,), generator=torch.Generator().manual_seed(2))
    targets[:ignored] = IGNORED
    head = HeadLoss(linear(), 16, classes=40, dtype=torch.float32)
    seen: list[int] = []
    head.body.register_forward_hook(lambda _, __, logits: seen.append(len(logits)))
    loss = head(hidden, targets, reduction, IGNORED, weight)
    loss.backward()
    assert seen == [16, 16, 16, 2] * 2
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logits = F.linear(hidden, weight).view(50, 40).float()
    kind = {1: "mean", 2: "sum"}[reduction]
    expected = F.cross_entropy(logits, targets, reduction=kind)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[0], hidden.grad, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1], weight.grad, rtol=0.02, atol=0.02, equal_nan=True)


def test_a_target_that_is_no_class_is_an_index_error() -> None:
    head = HeadLoss(linear(), 16, classes=40, dtype=torch.float32)
    targets = torch.full((50,), 41)
    with pytest.raises(IndexError, match="out of bounds"):
        head(numbers(50, 8, seed=0), targets, 1, IGNORED, numbers(40, 8, seed=1))
