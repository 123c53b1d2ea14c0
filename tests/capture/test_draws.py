"""Which starts draw a constructor's random numbers, and which need not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swaptrain.models import build
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights

pytestmark = pytest.mark.trains


def draws_of(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that hears of each construction whether it draws its random numbers."""
    draws: list[bool] = []
    original = build.construct

    def construct(*args: Any, draw: bool, **options: Any) -> Any:
        draws.append(draw)
        return original(*args, draw=draw, **options)

    monkeypatch.setattr(build, "construct", construct)
    return draws


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "data", "again"),
    [("gpt", "tokens", [False]), ("drawn", "vectors", [False, True])],
)
def test_going_on_draws_no_initial_weights(
    model: str, data: str, again: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take minutes for billions; but where the graph holds drawn numbers, it must."""
    tree = {
        "model": {"python": f"tests.support.models:{model}"},
        "data": {"python": f"tests.support.datasets:{data}"},
    }
    whole = trained(config_of(tmp_path / "whole", tree))
    draws = draws_of(monkeypatch)
    trained(config_of(tmp_path / "run", {**tree, "train": {"steps": 2}}))
    assert draws == [True]
    run_dir = trained(config_of(tmp_path / "run", tree))
    assert draws == [True, *again]
    assert losses(run_dir) == losses(whole)
    assert_same_bits(weights(run_dir), weights(whole))
