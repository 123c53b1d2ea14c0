"""Checks that a forward makes: on every micro-batch where they are of the batch, never lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaptrain.capture.checks.operation import check_computed, unchecked
from swaptrain.errors import CaptureError, RunError
from tests.capture.in_memory import captured_model, cut_everywhere, eager_step, segment_step
from tests.support.matrix import every
from tests.support.runs import config_of, losses, trained

pytestmark = pytest.mark.trains

Assertion = Callable[[Tensor, Tensor], None]


def tensor_all(ids: Tensor, hidden: Tensor) -> None:
    torch._check_tensor_all(ids < 20, lambda: "an id is too large")


def number_of_tokens(ids: Tensor, hidden: Tensor) -> None:
    tokens = (ids == 7).sum() * hidden.shape[-1]
    torch._check_tensor_all(tokens < 10_000, lambda: f"too many: {tokens}")


def items(ids: Tensor, hidden: Tensor) -> None:
    largest = ids.max().item()
    torch._check(largest < 20, lambda: "an id is too large")


def arithmetic(ids: Tensor, hidden: Tensor) -> None:
    low, high = ids.min().item(), ids.max().item()
    torch._check(2 * (high - low) + 1 <= 40, lambda: "an id is too large")


def asserted(ids: Tensor, hidden: Tensor) -> None:
    torch._assert((ids < 20).all(), "an id is too large")


def asserted_asynchronously(ids: Tensor, hidden: Tensor) -> None:
    torch._assert_async((ids < 20).all(), "an id is too large")


def after_a_write(ids: Tensor, hidden: Tensor) -> None:
    count = torch.zeros(64, dtype=torch.long)
    count.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
    torch._check_tensor_all(count[20:] == 0, lambda: "an id is too large")


def of_two_kinds(ids: Tensor, hidden: Tensor) -> None:
    torch._check_tensor_all(torch.isfinite(hidden), lambda: "hidden values are not finite")
    torch._check_tensor_all(ids < 20, lambda: "an id is too large")


OF_THE_BATCH = [tensor_all, items, arithmetic, asserted, asserted_asynchronously, after_a_write]


class Checking(nn.Module):
    """An embedding and two layers between which an assertion is made."""

    def __init__(self, assertion: Assertion) -> None:
        super().__init__()
        self.assertion = assertion
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.out = nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[0](self.embedding(ids)))
        self.assertion(ids, hidden)
        hidden = torch.tanh(self.layers[1](hidden))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), ids.flatten())


def batches(largest: int = 19) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    found = [{"ids": torch.randint(0, 20, (2, 8), generator=g)} for _ in range(2)]
    found[1]["ids"][0, 0] = largest
    return found


@pytest.mark.parametrize("assertion", every(3, [*OF_THE_BATCH, number_of_tokens, of_two_kinds]))
def test_a_model_that_checks_trains_with_plain_bits(assertion: Assertion, tmp_path: Path) -> None:
    """Nothing of the check is left in the way of a cut; loss and gradients are plain PyTorch's."""

    def make() -> nn.Module:
        return Checking(assertion)

    captured = cut_everywhere(captured_model(make, batches()[0], tmp_path))
    assert len(captured.model.segments) >= 5
    result = segment_step(captured, make, batches())
    assert not result.differences(eager_step(make, batches()))
    assert captured.checks.checks


@pytest.mark.parametrize("assertion", every(3, OF_THE_BATCH))
def test_a_check_of_the_batch_refuses_by_name(assertion: Assertion, tmp_path: Path) -> None:
    """The message is the model's own; plain PyTorch refuses the same micro-batch."""
    good, bad = batches(largest=20)
    uncut = captured_model(lambda: Checking(assertion), good, tmp_path)
    uncut.checks.verify(good, lambda: "item 0")
    with pytest.raises(CaptureError, match=r"item 3: .*an id is too large"):
        uncut.checks.verify(bad, lambda: "item 3")
    with pytest.raises((RuntimeError, AssertionError), match="an id is too large"):
        Checking(assertion)(**bad)


def test_the_first_micro_batch_is_checked_by_the_capture(tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(CaptureError, match=r"first micro-batch .*an id is too large"):
        captured_model(lambda: Checking(tensor_all), batches(largest=20)[1], tmp_path)


def test_a_check_of_computed_values_stays_with_its_segment(tmp_path: Path) -> None:
    """It is made in every forward, but in no dry run."""

    def large(ids: Tensor, hidden: Tensor) -> None:
        torch._check_tensor_all(hidden.abs() < 1e-6, lambda: "hidden values are large")

    captured = cut_everywhere(captured_model(lambda: Checking(large), batches()[0], tmp_path))
    assert captured.checks.computed == ("hidden values are large",)
    with pytest.raises(RunError, match="hidden values are large"):
        segment_step(captured, lambda: Checking(large), batches())
    with unchecked():
        segment_step(captured, lambda: Checking(large), batches())


def test_a_computed_number_is_checked_as_well(tmp_path: Path) -> None:
    """A chain of scalars that only an assertion reads stays whole in one segment."""

    def large(ids: Tensor, hidden: Tensor) -> None:
        torch._check(hidden.abs().max().item() * 2 + 1 < 1.0, lambda: "hidden values are large")

    captured = cut_everywhere(captured_model(lambda: Checking(large), batches()[0], tmp_path))
    with pytest.raises(RunError, match="hidden values are large"):
        segment_step(captured, lambda: Checking(large), batches())


def test_the_names_in_a_graph_are_the_same_in_every_process() -> None:
    """The fingerprint of a model holds them."""
    assert str(check_computed) == "swaptrain.check_computed"


class Ids:
    """Vectors of ids; item 9 has one that is too large."""

    largest = 20

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(8) + index % 5
        ids[0] = self.largest if index == 9 else 1
        return {"ids": ids}


def checking() -> nn.Module:
    return Checking(of_two_kinds)


RUN_MODULE = "tests.capture.checks.test_checks"
RUN: dict[str, Any] = {
    "model": {"python": f"{RUN_MODULE}:checking"},
    "data": {"python": f"{RUN_MODULE}:Ids", "micro_batch": 2},
    "memory": {"segment": "1KiB"},
    "train": {"steps": 3, "seed": 3, "threads": 1},
}


def test_a_run_stops_at_the_item_and_goes_on_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items 8 and 9 are micro-batch 2 of step 2: exit 2, after step 1; then as if never wrong."""
    config = config_of(tmp_path / "run", RUN)
    with pytest.raises(CaptureError, match=r"items 8, 9 of .*an id is too large") as refused:
        trained(config)
    assert refused.value.exit_code == 2
    assert len(losses(config.run.dir)) == 1
    monkeypatch.setattr(f"{RUN_MODULE}.Ids.largest", 2)
    whole = trained(config_of(tmp_path / "whole", RUN))
    assert losses(trained(config)) == losses(whole)
