"""Losses whose tokens are weighted, against plain PyTorch that sums and divides by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swaptrain.capture.losses.weighting import step_weights
from tests.capture.in_memory import (
    StepResult,
    captured_model,
    cut_everywhere,
    cut_into,
    eager_step,
    segment_step,
)
from tests.capture.losses.forms import ADDITIVE, HIDDEN, Form, Losses, batches
from tests.support.matrix import every, proof_but

pytestmark = pytest.mark.trains

UNEVEN = batches([10, 1, 0, 4])
EVEN = batches([4, 4, 4])


def plain_step(form: Form, given: list[dict[str, Tensor]]) -> StepResult:
    """Sum over the trained tokens and divide by their number in the step, in plain PyTorch."""
    torch.manual_seed(0)
    model = Losses(form).train()
    counts = [
        sum(term) for term in zip(*(form.count(model, b["labels"]) for b in given), strict=True)
    ]
    losses = []
    for batch in given:
        loss = model.part(**batch, n=counts, m=len(given))
        loss.backward()
        losses.append(float(loss.detach()))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return StepResult(losses, gradients, dict(model.named_buffers()))


@pytest.mark.parametrize("name", every(5, ADDITIVE))
def test_a_step_with_unequal_counts_is_the_sum_over_its_tokens(name: str, tmp_path: Path) -> None:
    """Bit for bit, in one segment and cut at every gap, with a micro-batch without a label."""
    form = ADDITIVE[name]
    factory = partial(Losses, form)
    uncut = captured_model(factory, UNEVEN[0], tmp_path)
    counter = uncut.losses.counter
    assert counter is not None, uncut.losses.reason
    counts = [counter(batch) for batch in UNEVEN]
    model = Losses(form)
    assert counts == [tuple(form.count(model, batch["labels"])) for batch in UNEVEN]
    weights = step_weights(counts)
    expected = plain_step(form, UNEVEN)
    for captured in (cut_into(uncut, 1 << 40), cut_everywhere(uncut)):
        assert segment_step(captured, factory, UNEVEN, weights).differences(expected) == []


@pytest.mark.parametrize(
    "name", proof_but(["penalty", "two heads", "masked by hand", "guarded", "exp"], "two heads")
)
def test_equal_counts_change_no_bit(name: str, tmp_path: Path) -> None:
    """It stays (loss / M).backward() where all micro-batches count equally many."""
    form = ADDITIVE[name] if name in ADDITIVE else HIDDEN[name][0]
    factory = partial(Losses, form)
    uncut = captured_model(factory, EVEN[0], tmp_path)
    weights = None
    if uncut.losses.counter is not None:
        weights = step_weights([uncut.losses.counter(batch) for batch in EVEN])
        assert weights is None
    result = segment_step(cut_everywhere(uncut), factory, EVEN, weights)
    assert result.differences(eager_step(factory, EVEN)) == []


@pytest.mark.parametrize("name", every(4, HIDDEN))
def test_what_cannot_be_weighted_says_why(name: str, tmp_path: Path) -> None:
    """A loss that is not additive in its cross entropy has no counter."""
    form, reason = HIDDEN[name]
    losses = captured_model(partial(Losses, form), EVEN[0], tmp_path).losses
    assert losses.counter is None
    assert reason in losses.reason
