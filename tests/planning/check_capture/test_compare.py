"""What the comparison with plain PyTorch catches, whatever the guards of a capture see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from swaptrain.errors import CaptureError
from swaptrain.planning.check_capture.compare import compare
from swaptrain.planning.check_capture.eager import plain_model
from tests.capture.in_memory import captured_model, cut_everywhere
from tests.planning.check_capture import members
from tests.support.matrix import every

pytestmark = pytest.mark.trains


def compared(plain: Callable[[], nn.Module], captured: Callable[[], nn.Module], tmp: Path) -> float:
    """Return the largest difference between a plain model and the capture of another one."""
    batch = {"x": torch.randn(4, members.WIDTH, generator=torch.Generator().manual_seed(1))}
    segments = cut_everywhere(captured_model(captured, batch, tmp))
    return compare(plain_model(plain, 0, None), segments, batch, seed=0).difference


@pytest.mark.parametrize("member", every(4, members.MEMBERS))
def test_a_model_that_is_not_what_was_captured_is_refused(member: str, tmp_path: Path) -> None:
    """Each member is the captured model at first sight: its guards are off, in effect."""
    with pytest.raises(CaptureError, match=r"plain PyTorch|draws from Python's random"):
        compared(members.closed_over(member), members.twin, tmp_path)


def test_the_captured_model_itself_has_the_same_bits(tmp_path: Path) -> None:
    """The members differ from this one."""
    assert compared(members.twin, members.twin, tmp_path) == 0.0


class Drops(nn.Module):
    """Draws masks of one shape in two places, and keeps one where `keeps` says so."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.keeps, self.masks = keeps, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.a(x), 0.2)
        if not self.masks or not self.keeps:
            self.masks[:] = [torch.rand(16) > 0.5]
        return (self.b(h * self.masks[0]) - x).square().mean()


def test_both_sides_get_the_same_draws(tmp_path: Path) -> None:
    """Dropout and a mask are the same in plain PyTorch, a forward and a recomputation."""
    assert compared(lambda: Drops(keeps=False), lambda: Drops(keeps=False), tmp_path) == 0.0


def test_a_mask_that_is_drawn_once_is_told_from_one_drawn_each_time(tmp_path: Path) -> None:
    """The draws of the second step are others than those of the first."""
    with pytest.raises(CaptureError, match="In step 2"):
        compared(lambda: Drops(keeps=True), lambda: Drops(keeps=False), tmp_path)


def test_checkpointing_draws_the_same_when_it_computes_again(tmp_path: Path) -> None:
    """Plain PyTorch recomputes a checkpointed dropout in its backward."""

    class Checkpointed(members.Layers):
        def __init__(self) -> None:
            super().__init__()
            self.middle = lambda h: torch.utils.checkpoint.checkpoint(
                nn.functional.dropout, h, 0.3, use_reentrant=False
            )

    assert compared(Checkpointed, Checkpointed, tmp_path) == 0.0
