"""Initial weights that are drawn: ranges of experts, each of the whole stack's values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from swaptrain.capture.init.construct import Construction, construct
from swaptrain.models.initial_weights import InitialWeights


class Experts(nn.Module):
    """Two stacks of four experts each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 3, 2))
        self.down = nn.Parameter(torch.randn(4, 2, 3))


def test_a_stack_is_drawn_once_for_ranges_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the values of the whole; only one is held, and a range is a copy."""
    torch.manual_seed(5)
    plain = Experts()
    construction = construct(Experts, seed=5, scratch_dir=tmp_path)
    drawn: list[str] = []
    value = Construction.value

    def noted(built: Construction, name: str) -> torch.Tensor:
        drawn.append(name)
        return value(built, name)

    monkeypatch.setattr(Construction, "value", noted)
    initial = InitialWeights(construction)
    for name, rows in (("up[0:2]", plain.up[0:2]), ("up[2:4]", plain.up[2:4])):
        initial.value(name).zero_()
        assert torch.equal(initial.value(name), rows)
    assert torch.equal(initial.value("down[1:2]"), plain.down[1:2])
    assert torch.equal(initial.value("down"), plain.down)
    assert torch.equal(initial.value("up[1:2]"), plain.up[1:2])
    assert drawn == ["up", "down", "down", "up"]
    initial.forget()
    with pytest.raises(RuntimeError, match="after they were forgotten"):
        initial.value("up[1:2]")
