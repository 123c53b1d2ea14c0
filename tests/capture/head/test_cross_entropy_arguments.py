"""Cross entropy by rows with every argument at unusual values: loss and gradients as torch's own.

N rows of C classes; each form of the loss is captured, cut nowhere, and trained a row at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaptrain.capture.capture import cut
from swaptrain.capture.cut import CutLimits
from swaptrain.capture.head import cross_entropy as module
from swaptrain.capture.head.cross_entropy import cross_entropy
from tests.capture.in_memory import captured_model, eager_step, segment_step
from tests.support.matrix import every, proof_but

pytestmark = pytest.mark.trains

N, C = 9, 6
LossOf = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Ends in a loss of logits [N, C] and targets [N]."""

    def __init__(self, loss_of: LossOf, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, C)
        self.loss_of, self.dtype = loss_of, dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Behind a product, so that what the loss reads is no cast of something else.
        return self.loss_of(self.head(torch.tanh(self.first(x))).to(self.dtype) * 2, y)


def compared(
    loss_of: LossOf,
    targets: Tensor,
    tmp_path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    by_rows: bool = True,
) -> None:
    """Train one step of two micro-batches a row at a time, and by plain PyTorch."""

    def factory() -> nn.Module:
        return Model(loss_of, dtype)

    batches = [
        {"x": torch.randn(N, 5, generator=torch.Generator().manual_seed(m)), "y": targets}
        for m in range(2)
    ]
    captured, _ = cut(
        captured_model(factory, batches[0], tmp_path),
        CutLimits(1 << 40, 1 << 41, 1 << 40, 2),
        state_bytes=lambda parameter: parameter.tensor.nbytes,
        working_bytes=lambda parameter: parameter.tensor.nbytes,
        cuts=[],
    )
    used = any(
        node.target is cross_entropy for code in captured.codes for node in code.train.graph.nodes
    )
    assert used == by_rows
    found, expected = segment_step(captured, factory, batches), eager_step(factory, batches)
    for one, other in zip(found.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=0, atol=0, equal_nan=True, msg=name
        )


@pytest.fixture(autouse=True)
def two_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nine rows end in a piece of one."""
    monkeypatch.setattr(module, "PIECE_BYTES", 2 * C * 4)


CLASSES = torch.arange(N) % C


IGNORED = [0, 1, C - 1, -1, -2, -100, C, 2**40, -(2**40)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", IGNORED)
@pytest.mark.parametrize("ignored", ["none", "some", "all", "all but one"])
def test_whatever_class_is_ignored(ignore_index: int, ignored: str, reduction: str) -> None:
    """A class, a negative number, one beyond the classes; all rows (nan as torch), or one left."""
    targets = torch.where(ignore_index == CLASSES, (ignore_index + 1) % C, CLASSES)
    if ignored != "none":
        rows = {"some": [2, 3, 8], "all": range(N), "all but one": range(1, N)}[ignored]
        targets[list(rows)] = ignore_index
    logits = torch.randn(N, C, generator=torch.Generator().manual_seed(0))

    def both(loss_of: LossOf) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = loss_of(leaf, targets)
        (loss * 3).backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    number, settings = {"mean": 1, "sum": 2}[reduction], {"shape": (N, C), "dtype": logits.dtype}
    expected = both(
        lambda z, y: F.cross_entropy(z, y, ignore_index=ignore_index, reduction=reduction)
    )
    found = both(lambda z, y: cross_entropy(z, y, number, ignore_index, **settings))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("ignore_index", "reduction"), [(0, "mean"), (C - 1, "sum"), (-7, "mean")])
def test_an_ignored_class_of_a_captured_loss(
    ignore_index: int, reduction: str, tmp_path: Path
) -> None:
    targets = torch.where(CLASSES == 2, ignore_index, CLASSES)
    compared(
        lambda z, y: F.cross_entropy(z, y, ignore_index=ignore_index, reduction=reduction),
        targets,
        tmp_path,
    )


USES: dict[str, LossOf] = {
    "logarithm": lambda z, y: F.cross_entropy(z, y, ignore_index=0).log(),
    "product": lambda z, y: F.cross_entropy(z, y, ignore_index=0, reduction="sum") * z.mean(),
    "twice": lambda z, y: (lambda a: a * a + a)(F.cross_entropy(z, y, ignore_index=1)),
    "two losses": lambda z, y: F.cross_entropy(z, y) - F.cross_entropy(z, 5 - y, ignore_index=0),
    "logits read too": lambda z, y: F.cross_entropy(z, y) + z.logsumexp(1).square().mean(),
    "no gradient": lambda z, y: F.cross_entropy(z.detach(), y) + z.square().mean(),
    "no gradient at all": lambda z, y: z.mean() * F.cross_entropy(z, y).detach(),
    "negated": lambda z, y: -F.cross_entropy(z, y, reduction="sum") / 7,
    "transposed": lambda z, y: F.cross_entropy(z.view(N, C).t().contiguous().t().contiguous(), y),
    "reshaped": lambda z, y: F.cross_entropy(z.view(3, 3, C).view(-1, C), y.view(-1)),
    "widened": lambda z, y: F.cross_entropy(z.double(), y, ignore_index=2),
    "narrowed": lambda z, y: F.cross_entropy(z.bfloat16(), y, ignore_index=3),
    "narrowed and widened": lambda z, y: F.cross_entropy(z.bfloat16().float(), y),
    "cast in vain": lambda z, y: F.cross_entropy(z.float(), y),
    "cast as another": lambda z, y: F.cross_entropy(z.bfloat16().type_as(z), y),
    "cast by keyword": lambda z, y: F.cross_entropy(z.to(dtype=torch.float64), y),
    "converted targets": lambda z, y: F.cross_entropy(z, y.int().long()),
    "shifted": lambda z, y: F.cross_entropy(z[:-1], y[1:], ignore_index=0),
    "one class": lambda z, y: F.cross_entropy(z[:, :1].contiguous(), y * 0) + z.mean(),
    "one row": lambda z, y: F.cross_entropy(z[:1], y[:1]),
}


@pytest.mark.parametrize("use", every(4, USES))
def test_however_the_loss_and_the_logits_are_used(use: str, tmp_path: Path) -> None:
    compared(USES[use], CLASSES, tmp_path, by_rows=True)


LEFT_ALONE: dict[str, LossOf] = {
    "each": lambda z, y: F.cross_entropy(z, y, reduction="none", ignore_index=0).square().sum(),
    "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1, ignore_index=0),
    "weighted": lambda z, y: F.cross_entropy(z, y, weight=torch.arange(1.0, C + 1), ignore_index=0),
    "weights that train": lambda z, y: F.cross_entropy(z, y, weight=z[0].exp().detach()),
    "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, C).to(z.dtype)),
    "one item": lambda z, y: F.cross_entropy(z[0], y[0]),
    "inner classes": lambda z, y: F.cross_entropy(
        z.view(3, 3, C).transpose(1, 2), y.view(3, 3), ignore_index=0
    ),
    "not contiguous": lambda z, y: F.cross_entropy(z.t().contiguous().t(), y, ignore_index=0),
    "expanded": lambda z, y: F.cross_entropy(z[:1].expand(N, C), y, ignore_index=0),
    "no rows": lambda z, y: F.cross_entropy(z[:0], y[:0], reduction="sum") + z.mean(),
    "by its parts": lambda z, y: F.nll_loss(F.log_softmax(z, 1), y, ignore_index=0),
}


@pytest.mark.parametrize("form", every(4, LEFT_ALONE))
def test_forms_that_it_does_not_take_are_torchs(form: str, tmp_path: Path) -> None:
    compared(LEFT_ALONE[form], CLASSES, tmp_path, by_rows=False)


@pytest.mark.parametrize(
    "dtype", proof_but([torch.float64, torch.bfloat16, torch.float16], torch.bfloat16)
)
@pytest.mark.parametrize("ignore_index", [0, -100])
def test_logits_of_other_widths(dtype: torch.dtype, ignore_index: int, tmp_path: Path) -> None:
    compared(
        lambda z, y: F.cross_entropy(z, y, ignore_index=ignore_index),
        CLASSES,
        tmp_path,
        dtype=dtype,
    )


def test_a_write_inside_a_region_without_gradients_is_a_write(tmp_path: Path) -> None:
    """The logits are read again in the backward, when they are no longer what they were."""

    def loss_of(logits: Tensor, y: Tensor) -> Tensor:
        shown = logits * 1
        wide = shown.double()
        with torch.no_grad():
            shown.mul_(2)
        return F.cross_entropy(wide, y) + shown.mean()

    compared(loss_of, CLASSES, tmp_path, by_rows=False)
