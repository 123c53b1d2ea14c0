"""Products that send all rows through all experts, in ranges of these: which have their bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from swaptrain.capture.ranges.batch_operations import BATCH_RANGE, FIRST_EXPERT, least_experts
from swaptrain.capture.ranges.divide import divide, divisible_parameters
from swaptrain.program.row_ranges import row_ranges
from tests.capture.in_memory import captured_model, cut_everywhere, legal_gaps, product_flops
from tests.support.matrix import matrix
from tests.support.mixtures import DENSE_MIXTURE, EXPERTS

EACH = (1, 4, 33)
"""Rows of an expert."""
WIDTHS = ((16, 48), (64, 16), (64, 128))


def chained(rows: Tensor, parts: Sequence[Tensor]) -> Tensor:
    made, first = None, 0
    for part in parts:
        made = BATCH_RANGE(rows, part, FIRST_EXPERT(rows, first), made)
        first += len(part)
    assert made is not None
    return made


def bits(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Return a product and its gradients as whole numbers, so that 0.0 is not -0.0."""
    g = torch.Generator().manual_seed(1)
    found = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=g).to(out.dtype))
    width = torch.int32 if out.dtype == torch.float32 else torch.int16
    return [t.detach().contiguous().view(width) for t in (out, *found)]


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    ("most", "each", "widths", "dtype"),
    matrix((2, 3, 6), EACH, WIDTHS, (torch.float32, torch.bfloat16), by_pairs=False),
)
def test_ranges_of_dense_experts_have_the_bits_of_the_whole_product(
    most: int, each: int, widths: tuple[int, int], dtype: torch.dtype, turned: bool
) -> None:
    """The product, and the gradients of rows and weights."""
    g = torch.Generator().manual_seed(0)
    k, n = widths
    rows = torch.randn(EXPERTS, each, k, generator=g).to(dtype)
    stack = torch.randn(EXPERTS, *((n, k) if turned else (k, n)), generator=g).to(dtype)

    def read(weight: Tensor) -> Tensor:
        return weight.transpose(1, 2) if turned else weight

    a, b = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    own = stack.clone().requires_grad_()
    parts = [part.clone().requires_grad_() for part in stack.split(most)]
    out, of_rows, of_stack = bits(torch.bmm(a, read(own)), a, own)
    made, rows_made, *parts_made = bits(chained(b, [read(part) for part in parts]), b, *parts)
    assert torch.equal(out, made)
    assert torch.equal(of_rows, rows_made)
    assert torch.equal(of_stack, torch.cat(parts_made))


def dense_mixture() -> nn.Module:
    transformers.logging.set_verbosity_error()
    config = transformers.Llama4TextConfig(**DENSE_MIXTURE, use_cache=False)
    return transformers.Llama4ForCausalLM(config)


@pytest.mark.parametrize(
    ("experts", "each", "k", "n"),
    [(8, 2, 24, 40), (8, 1, 32, 32), (8, 4, 8, 64), (16, 1, 32, 32), (8, 2, 16, 16)],
)
def test_small_products_have_ranges_that_go_to_the_same_kernel(
    experts: int, each: int, k: int, n: int
) -> None:
    """bfloat16 products of 4,096 multiplications and less go to another one."""
    least = least_experts(experts, each * k * n)
    assert least == 2 if experts * each * k * n <= 4096 else least * each * k * n > 4096
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        rows = torch.randn(experts, each, k, generator=g).bfloat16().requires_grad_()
        stack = torch.randn(experts, k, n, generator=g).bfloat16()
        whole = stack.clone().requires_grad_()
        parts = [part.clone().requires_grad_() for part in stack.split(least)]
        if len(parts[-1]) < least:
            continue
        found = bits(torch.bmm(rows, whole), rows, whole)
        made, of_rows, *of_parts = bits(chained(rows, parts), rows, *parts)
        assert torch.equal(found[0], made) and torch.equal(found[1], of_rows)
        assert torch.equal(found[2], torch.cat(of_parts))


@pytest.mark.trains
def test_a_dense_mixture_is_divided(tmp_path: Path) -> None:
    """Cuts lie between ranges, and ranges of a size share their code."""
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    uncut = captured_model(dense_mixture, batch, tmp_path)
    found = {name: least for name, least in divisible_parameters(uncut).items() if "exp" in name}
    assert set(found.values()) == {2} and len(found) == 4
    divided = divide(uncut, {name: tuple(row_ranges(name, EXPERTS, 2)) for name in found})
    assert product_flops(divided) == product_flops(uncut)
    gaps = legal_gaps(divided)
    products = [n.name for n in divided.captured.graph.nodes if n.target is BATCH_RANGE]
    assert len(products) == 16 and all(gaps[name] for name in products)
    segments = cut_everywhere(divided).model.segments
    of_ranges = [s for s in segments if any("[" in name for name in s.owns)]
    others = {s.isomorphism for s in of_ranges if "[0:2]" not in s.owns[0]}
    assert (len(of_ranges), len(others)) == (16, 2)
