"""A head over the rows whose label counts: which heads, and that the rows are those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from swaptrain.capture.head.loss_by_rows import replace_cross_entropy
from swaptrain.capture.head.trained_rows import all_rows, trained_rows
from tests.capture.head.test_cross_entropy import CLASSES, exported

IGNORED = -100
LABELS = CLASSES.clone()
LABELS[0, :4] = IGNORED
LABELS[2] = IGNORED

Loss = Callable[[Tensor, Tensor], Tensor]


def usual(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.float().view(-1, 7), y.view(-1))


def capped(x: Tensor, y: Tensor) -> Tensor:
    """As Gemma 2 and Granite treat their logits."""
    x = torch.tanh(x[:, :5] / 3.0) * 3.0
    return F.cross_entropy(x.float().contiguous().view(-1, 7), y.view(-1), reduction="sum")


def penalised(x: Tensor, y: Tensor) -> Tensor:
    """Something else reads the logits."""
    return usual(x, y) + x.square().mean()


def shifted(x: Tensor, y: Tensor) -> Tensor:
    """Rows that the loss does not see at all are no rows of labels."""
    return F.cross_entropy(x[:, :-1].float().reshape(-1, 7), y[:, 1:].reshape(-1))


def both(graph: fx.GraphModule, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the loss, and the gradients of the head's weight and bias and of `x`."""
    leaf = x.clone().requires_grad_()
    tensors = [*graph.parameters(), leaf]
    loss = graph(leaf, y)
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


def skipping(loss_of: Loss) -> tuple[fx.GraphModule, fx.GraphModule]:
    plain, changed = exported(loss_of, LABELS), exported(loss_of, LABELS)
    changed.load_state_dict(plain.state_dict())
    replace_cross_entropy(changed.graph, changed, skip_ignored=True)
    changed.recompile()
    return plain, changed


def skips(graph: fx.GraphModule) -> bool:
    return any(node.target is trained_rows for node in graph.graph.nodes)


@pytest.mark.parametrize("loss_of", [usual, capped])
@pytest.mark.parametrize("labels", [LABELS, CLASSES, torch.full_like(CLASSES, IGNORED)])
def test_loss_and_gradients_are_those_of_all_rows(loss_of: Loss, labels: Tensor) -> None:
    """Of few numbers, whose sums have one order; with all rows ignored too."""
    plain, changed = skipping(loss_of)
    assert skips(changed)
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    for expected, found in zip(both(plain, x, labels), both(changed, x, labels), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3, equal_nan=True)


def test_the_head_sees_the_rows_that_count() -> None:
    _, changed = skipping(usual)
    seen: list[int] = []

    class Watch(fx.Interpreter):
        def call_function(self, target: object, args: object, kwargs: object) -> object:
            if target is torch.ops.aten.linear.default:
                seen.append(len(args[0]))  # type: ignore[index]  # of a linear layer
            return super().call_function(target, args, kwargs)  # type: ignore[arg-type]

    x = torch.randn(3, 5, 4).bfloat16()
    Watch(changed).run(x, LABELS)
    with all_rows():
        Watch(changed).run(x, LABELS)
    Watch(changed).run(x, CLASSES)
    assert seen == [6, 15, 15]


@pytest.mark.parametrize("loss_of", [penalised, shifted])
def test_other_heads_stay_whole(loss_of: Loss) -> None:
    _, changed = skipping(loss_of)
    assert not skips(changed)
