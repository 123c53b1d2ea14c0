"""Stacks of experts in ranges: the products, their gradients, and which graphs are divided."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from swaptrain.capture.ranges.divide import divide, divisible_parameters
from swaptrain.capture.ranges.expert_operations import BOUNDS, RANGE, even_bounds
from swaptrain.program.row_ranges import RowRange, range_of, row_ranges
from tests.capture.in_memory import captured_model, cut_everywhere, legal_gaps, product_flops
from tests.support.matrix import matrix
from tests.support.mixtures import EXPERTS, MIXTURES

COUNTS = {
    "uneven": (3, 0, 7, 1, 0, 4, 2, 3),
    "one has all": (0, 0, 0, 0, 0, 20, 0, 0),
    "the first has none": (0, 5, 5, 0, 5, 5, 0, 0),
}
K, N = 32, 48


def operands(counts: Sequence[int], dtype: torch.dtype, turned: bool) -> tuple[Tensor, ...]:
    """Return rows, a stack, and where the rows of each expert end."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), K, generator=g).to(dtype)
    stack = torch.randn(*((EXPERTS, N, K) if turned else (EXPERTS, K, N)), generator=g).to(dtype)
    return rows, stack, torch.tensor(counts).cumsum(0).int()


def gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Return a product and its gradients as whole numbers, so that 0.0 is not -0.0."""
    g = torch.Generator().manual_seed(1)
    found = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=g).to(out.dtype))
    width = torch.int32 if out.dtype == torch.float32 else torch.int16
    return [t.detach().contiguous().view(width) for t in (out, *found)]


def whole(rows: Tensor, stack: Tensor, offsets: Tensor, turned: bool, grouped: bool) -> Tensor:
    weight = stack.transpose(-2, -1) if turned else stack
    if grouped:
        return torch._grouped_mm(rows, weight, offs=offsets)
    import transformers.integrations.moe  # noqa: F401  (it registers the operation)

    found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, offsets)
    return found


def chained(
    rows: Tensor, parts: Sequence[Tensor], offsets: Tensor, turned: bool, grouped: bool
) -> Tensor:
    made, first = None, 0
    for part in parts:
        bounds = BOUNDS(offsets, first, first + len(part))
        weight = part.transpose(-2, -1) if turned else part
        made = RANGE(rows, weight, bounds, made, grouped)
        first += len(part)
    assert made is not None
    return made


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("most", "counts", "dtype"),
    matrix((1, 2, 3, 8), COUNTS, (torch.float32, torch.bfloat16), by_pairs=False),
)
def test_ranges_of_experts_have_the_bits_of_the_whole_product(
    most: int, counts: str, dtype: torch.dtype, grouped: bool, turned: bool
) -> None:
    """The product, and the gradients of rows and weights: torch's own, and transformers' loop."""
    rows, stack, offsets = operands(COUNTS[counts], dtype, turned)
    a, b = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    own = stack.clone().requires_grad_()
    parts = [part.clone().requires_grad_() for part in stack.split(most)]
    out, of_rows, of_stack = gradients(whole(a, own, offsets, turned, grouped), a, own)
    made, rows_made, *parts_made = gradients(chained(b, parts, offsets, turned, grouped), b, *parts)
    assert torch.equal(out, made)
    assert torch.equal(of_rows, rows_made)
    assert torch.equal(of_stack, torch.cat(parts_made))


def test_frozen_experts_hand_gradients_on_and_make_none() -> None:
    """Their rows are not kept for a backward, which has no use for them."""
    rows, stack, offsets = operands(COUNTS["uneven"], torch.float32, True)
    rows.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        made = chained(rows, stack.split(2), offsets, True, True)
    assert not any(tensor.data_ptr() == rows.data_ptr() for tensor in kept)
    (of_rows,) = torch.autograd.grad(made.sum(), rows)
    assert of_rows.isfinite().all() and of_rows.ne(0).any()


def test_what_is_measured_gives_each_expert_as_many_rows() -> None:
    """A router of zeros gives all of them to the first experts."""
    offsets = torch.tensor([16, 16, 16, 16, 16, 16, 16, 16]).int()
    with even_bounds():
        assert BOUNDS(offsets, 2, 5).tolist() == [4, 6, 8, 10]
    assert BOUNDS(offsets, 2, 5).tolist() == [16, 16, 16, 16]


def test_a_range_has_a_name_that_says_which() -> None:
    ranges = list(row_ranges("a.w", 8, 3))
    assert [each.name for each in ranges] == ["a.w[0:3]", "a.w[3:6]", "a.w[6:8]"]
    assert [range_of(each.name) for each in ranges] == ranges
    assert range_of("a.w") is None
    assert range_of("a.w[0:3].b") is None


def mixture(**fields: Any) -> nn.Module:
    transformers.logging.set_verbosity_error()
    given = {**MIXTURES["qwen3_moe"], **fields}
    given.pop("model_type", None)
    config = transformers.Qwen3MoeConfig(**given, use_cache=False)
    return transformers.Qwen3MoeForCausalLM(config)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


class Penalised(nn.Module):
    """The loss reads the weights of the experts too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mixture(num_hidden_layers=1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        penalty = self.inner.model.layers[0].mlp.experts.down_proj.square().mean()
        loss: Tensor = self.inner(input_ids=input_ids, labels=labels).loss + penalty
        return loss


@pytest.mark.trains
def test_a_divided_graph_stands_beside_the_one_it_comes_of(tmp_path: Path) -> None:
    """Parameters in the model's order, cuts between ranges, code that ranges of a size share."""
    uncut = captured_model(mixture, batch(), tmp_path)
    nodes = len(uncut.captured.graph.nodes)
    found = divisible_parameters(uncut)
    assert next(iter(found)) == "model.embed_tokens.weight"
    stacks = list(found)[1:]
    assert stacks == [
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
    ]
    divided = divide(uncut, {name: tuple(row_ranges(name, EXPERTS, 2)) for name in stacks})
    assert len(uncut.captured.graph.nodes) == nodes
    order = [
        name if name not in stacks else f"{name}[{first}:{first + 2}]"
        for name in uncut.parameters
        for first in (range(0, EXPERTS, 2) if name in stacks else [0])
    ]
    assert list(divided.parameters) == order
    spec = divided.parameters[f"{stacks[0]}[2:4]"]
    assert spec.rows == RowRange(stacks[0], 2, 4)
    assert spec.tensor.shape == (2, *uncut.parameters[spec.rows.whole].tensor.shape[1:])
    fewer = captured_model(partial(mixture, num_experts_per_tok=1), batch(), tmp_path / "fewer")
    of_one = 2 * 32 * (32 * 32 + 16 * 32)  # 32 tokens, gate and up and down
    assert product_flops(divided) == product_flops(uncut) == product_flops(fewer) + 2 * of_one
    gaps = legal_gaps(divided)
    products = [n.name for n in divided.captured.graph.nodes if n.target is RANGE]
    assert len(products) == 16 and all(gaps[name] for name in products)
    segments = cut_everywhere(divided).model.segments
    of_ranges = [s for s in segments if any("[" in name for name in s.owns)]
    first_of_stacks = {s.isomorphism for s in of_ranges if "[0:2]" in s.owns[0]}
    others = {s.isomorphism for s in of_ranges if "[0:2]" not in s.owns[0]}
    assert len(of_ranges) == 16
    assert (len(first_of_stacks), len(others)) == (2, 2)  # of gate_up_proj, and of down_proj


@pytest.mark.trains
def test_a_stack_that_something_else_reads_is_left_whole(tmp_path: Path) -> None:
    found = divisible_parameters(captured_model(Penalised, batch(), tmp_path))
    stacks = [name for name in found if "experts" in name]
    assert stacks == ["inner.model.layers.0.mlp.experts.gate_up_proj"]
