"""Cross entropy by rows: torch's bits, in less memory, and only where the loss has a usual form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from swaptrain.capture.head import cross_entropy as module
from swaptrain.capture.head.cross_entropy import cross_entropy
from swaptrain.capture.head.loss_by_rows import replace_cross_entropy

IGNORED = -100


@pytest.fixture(autouse=True)
def one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 300),
    classes=st.integers(2, 700),
    dtypes=st.sampled_from(
        [
            ("bfloat16", "float32"),
            ("float32", "float32"),
            ("bfloat16", "bfloat16"),
            ("float64", "float64"),
        ]
    ),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored=st.floats(0, 1),
    piece_rows=st.integers(1, 40),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_the_bits_are_torchs(
    rows: int,
    classes: int,
    dtypes: tuple[str, str],
    reduction: str,
    ignored: float,
    piece_rows: int,
    scale: float,
    seed: int,
) -> None:
    """Loss and gradient, whatever is ignored (all of it, too) and however the rows are divided."""
    given_dtype, dtype = (getattr(torch, name) for name in dtypes)
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * scale).to(given_dtype)
    targets = torch.randint(classes, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = IGNORED

    def both(loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = loss_of(leaf)
        (loss / 3).backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    module._PIECE_BYTES = piece_rows * classes * dtype.itemsize
    number = {"mean": 1, "sum": 2}[reduction]
    expected = both(lambda x: F.cross_entropy(x.to(dtype), targets, reduction=reduction))
    found = both(
        lambda x: cross_entropy(x, targets, number, IGNORED, shape=(rows, classes), dtype=dtype)
    )
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_target_that_is_no_class_is_an_index_error() -> None:
    """As with torch: the planner explains it by that."""
    logits, targets = torch.zeros(4, 3), torch.tensor([0, 1, 3, 2])
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy(logits, targets, 1, IGNORED, shape=(4, 3), dtype=torch.float32)


class Head(nn.Module):
    """A loss over logits of 3 times 5 rows and 7 classes."""

    def __init__(self, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 7, dtype=torch.bfloat16)
        self.loss_of = loss_of

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss_of(self.linear(x), targets)


def exported(loss_of: Callable[[Tensor, Tensor], Tensor], targets: Tensor) -> fx.GraphModule:
    example = (torch.zeros(3, 5, 4, dtype=torch.bfloat16), targets)
    captured = torch.export.export(Head(loss_of), example, strict=False).module()
    assert isinstance(captured, fx.GraphModule)
    for node in captured.graph.nodes:  # as swaptrain.capture.export does
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            captured.graph.erase_node(node)
    captured.recompile()
    return captured


def functions(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


CLASSES = torch.arange(15).reshape(3, 5) % 7


def test_the_cast_of_the_logits_becomes_part_of_it() -> None:
    """Then no float32 copy of them is ever made whole."""
    graph = exported(lambda x, y: F.cross_entropy(x.float().view(-1, 7), y.view(-1)), CLASSES)
    x = torch.randn(3, 5, 4).bfloat16()
    expected = graph(x, CLASSES)
    replace_cross_entropy(graph.graph, graph)
    graph.recompile()
    assert not any("to.dtype" in name for name in functions(graph))
    assert any(node.target is cross_entropy for node in graph.graph.nodes)
    assert torch.equal(graph(x, CLASSES), expected)


def test_a_cast_that_something_else_reads_stays() -> None:
    def with_penalty(x: Tensor, y: Tensor) -> Tensor:
        wide = x.float().view(-1, 7)
        return F.cross_entropy(wide, y.view(-1)) + wide.logsumexp(1).square().mean()

    graph = exported(with_penalty, CLASSES)
    x = torch.randn(3, 5, 4).bfloat16()
    expected = graph(x, CLASSES)
    replace_cross_entropy(graph.graph, graph)
    graph.recompile()
    assert any("to.dtype" in name for name in functions(graph))
    assert any(node.target is cross_entropy for node in graph.graph.nodes)
    assert torch.equal(graph(x, CLASSES), expected)


def test_a_graph_that_writes_stays_as_it_is() -> None:
    """Later, and in the backward, the logits would not be what the cast has seen."""

    def writes_after_the_cast(x: Tensor, y: Tensor) -> Tensor:
        wide = x.float()
        x.mul_(2)
        return F.cross_entropy(wide.view(-1, 7), y.view(-1)) + x.float().mean()

    graph = exported(writes_after_the_cast, CLASSES)
    before = functions(graph)
    assert any("mul_" in name for name in before)
    replace_cross_entropy(graph.graph, graph)
    assert functions(graph) == before


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x, y: F.cross_entropy(x.float().view(-1, 7), y.view(-1), label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x.float().view(-1, 7), y.view(-1), weight=torch.ones(7)),
        lambda x, y: F.cross_entropy(x.float().view(-1, 7), y.view(-1), reduction="none").sum(),
        lambda x, y: F.cross_entropy(x.float().transpose(1, 2), y),
        lambda x, y: F.cross_entropy(x.float().view(-1, 7), F.one_hot(y.view(-1), 7).float()),
    ],
    ids=["smoothed", "weighted", "each", "classes-inside", "probabilities"],
)
def test_other_forms_stay_as_they_are(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = exported(loss_of, CLASSES)
    before = functions(graph)
    replace_cross_entropy(graph.graph, graph)
    assert functions(graph) == before
