"""Embeddings in ranges of rows: the lookups, their gradients, and which are divided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swaptrain.capture.ranges.divide import divide, divisible_parameters
from swaptrain.capture.ranges.lookup_operations import FIRST, LOOKUP
from swaptrain.program.row_ranges import row_ranges
from tests.capture.in_memory import captured_model, cut_everywhere, legal_gaps

ROWS, WIDTH = 40, 8


def bits(tensor: Tensor) -> Tensor:
    """Return whole numbers, so that 0.0 is not -0.0."""
    return tensor.detach().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def chained(indices: Tensor, parts: Sequence[Tensor], padding: int, rows: int = ROWS) -> Tensor:
    made, first = None, 0
    for part in parts:
        made = LOOKUP(indices, part, FIRST(indices, first, rows), made, padding)
        first += len(part)
    assert made is not None
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [-1, 0, 17, 39])
@pytest.mark.parametrize("most", [1, 7, 16, 40])
def test_ranges_of_an_embedding_have_the_bits_of_the_whole(
    most: int, padding: int, dtype: torch.dtype
) -> None:
    """The rows, and the gradient of each, which many indices have a part in."""
    g = torch.Generator().manual_seed(0)
    indices = torch.randint(0, ROWS // 2, (3, 64), generator=g)
    indices[0, :4] = torch.tensor([0, 17, 39, 39])
    table = torch.randn(ROWS, WIDTH, generator=g).to(dtype)
    gradient = torch.randn(3, 64, WIDTH, generator=g).to(dtype)
    gradient[1, :8] = torch.tensor(-0.0)
    whole = table.clone().requires_grad_()
    found = torch.ops.aten.embedding(whole, indices, padding)
    found.backward(gradient)
    parts = [part.clone().requires_grad_() for part in table.split(most)]
    made = chained(indices, parts, padding)
    made.backward(gradient)
    assert torch.equal(bits(made), bits(found))
    assert whole.grad is not None
    of_parts = [part.grad for part in parts if part.grad is not None]
    assert torch.equal(bits(torch.cat(of_parts)), bits(whole.grad))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (6,), (4, 6), (2, 3, 4)])
def test_indices_may_have_any_shape_and_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One alone, and those of a transposed tensor: memory is laid out as torch does."""
    g = torch.Generator().manual_seed(0)
    indices = (
        torch.randint(0, ROWS, shape, generator=g)
        .to(dtype)
        .permute(tuple(reversed(range(len(shape)))))
    )
    table = torch.randn(ROWS, WIDTH, generator=g)
    whole = table.clone().requires_grad_()
    found = torch.ops.aten.embedding(whole, indices)
    parts = [part.clone().requires_grad_() for part in table.split(16)]
    made = chained(indices, parts, -1)
    assert (made.shape, made.stride()) == (found.shape, found.stride())
    assert torch.equal(made, found)
    found.sum().backward()
    made.sum().backward()
    of_parts = [part.grad for part in parts if part.grad is not None]
    assert whole.grad is not None and torch.equal(torch.cat(of_parts), whole.grad)


@pytest.mark.parametrize("index", [-1, ROWS])
def test_an_index_that_the_embedding_has_not_is_an_error(index: int) -> None:
    """As in torch; a range by itself would take it for one of another range."""
    with pytest.raises(IndexError, match="index out of range"):
        chained(torch.tensor([0, index]), torch.randn(ROWS, WIDTH).split(16), -1)


def test_a_frozen_range_keeps_nothing() -> None:
    kept: list[Tensor] = []
    below = torch.randn(2, WIDTH, requires_grad=True)
    indices = torch.tensor([1, 30])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        made = LOOKUP(indices, torch.randn(16, WIDTH), FIRST(indices, 16, ROWS), below, -1)
    (of_others,) = torch.autograd.grad(made.sum(), below)
    assert torch.equal(of_others, torch.ones(2, WIDTH))
    assert all(tensor.dtype == torch.int64 for tensor in kept)


class Tables(nn.Module):
    """Two embeddings of the same indices, one that a head is tied to, one that frequency scales."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Embedding(ROWS, 16, padding_idx=3)
        self.other = nn.Embedding(ROWS, 16)
        self.tied = nn.Embedding(ROWS, 16)
        self.scaled = nn.Embedding(ROWS, 16, scale_grad_by_freq=True)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.own(ids) + self.other(ids).tanh() + self.tied(ids) * self.scaled(ids)
        out = found @ self.tied.weight.t()
        return nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())


@pytest.mark.trains
def test_a_graph_with_embeddings_is_divided(tmp_path: Path) -> None:
    """Cuts lie between ranges, and ranges of a size share their code."""
    ids = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(1))
    uncut = captured_model(Tables, {"ids": ids}, tmp_path)
    found = divisible_parameters(uncut)
    assert list(found) == ["own.weight", "other.weight"]
    divided = divide(uncut, {name: tuple(row_ranges(name, ROWS, 8)) for name in found})
    names = [f"{name}[{first}:{first + 8}]" for name in found for first in range(0, ROWS, 8)]
    assert [name for name in divided.parameters if "[" in name] == names
    gaps = legal_gaps(divided)
    lookups = [n.name for n in divided.captured.graph.nodes if n.target is LOOKUP]
    assert len(lookups) == 10 and all(gaps[name] for name in lookups[:-1])
    segments = cut_everywhere(divided).model.segments
    assert len(segments) >= 10
    own = [s.isomorphism for s in segments if s.owns and s.owns[0].startswith("own.weight[")]
    assert len(set(own[1:])) == 1
