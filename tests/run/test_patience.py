"""`eval.patience`: a run ends when its held-out loss has not fallen for so many evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.observe.eval_history import EvalHistory
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, rows, trained, weights
from tests.whole.test_exactness import LLAMA

TEXT = {"python": "tests.support.datasets:text"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": {"optimizer": {"clip_norm": 1e-30, "name": "sgd", "lr": 1e-30}},
    "trees": {"store": {"commit": {"every": 3}}},
    "step": {"store": {"commit": {"unit": "step"}}},
}


def job(run_dir: Path, settings: str, steps: int = 9, **evaluation: Any) -> Config:
    """Return a run whose weights do not move, so that no loss is lower than the first."""
    tree: dict[str, Any] = {"model": {"hf": LLAMA}, "data": TEXT, "train": {"steps": steps}}
    tree["optimizer"] = {"name": "sgd", "lr": 1e-30}
    tree["memory"] = {"segment": "128KiB"}
    tree["eval"] = {**TEXT, "every": 1, "batches": 2, **evaluation}
    return config_of(run_dir, {**tree, **SETTINGS[settings]})


@pytest.mark.trains
@pytest.mark.parametrize(
    "settings", proof_but(SETTINGS, "trees", whole=("clipped", "step", "fused"))
)
def test_a_run_that_learns_nothing_more_ends(settings: str, tmp_path: Path) -> None:
    """Behind the last evaluation that counts, whole; started again it stays, or goes on."""
    run_dir = trained(job(tmp_path / "run", settings, patience=2))
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3]
    trained(job(tmp_path / "run", settings, patience=2))
    assert len(rows(run_dir)) == 3
    trained(job(tmp_path / "run", settings, patience=4))
    assert len(rows(run_dir)) == 5
    trained(job(tmp_path / "run", settings))
    assert len(rows(run_dir)) == 9
    whole = trained(job(tmp_path / "whole", settings))
    assert_same_bits(weights(run_dir), weights(whole))
    assert [row["loss"] for row in rows(run_dir)] == [row["loss"] for row in rows(whole)]


def test_the_lowest_loss_is_waited_for() -> None:
    """As low is not lower, nor is what is not finite; a lower one begins anew."""
    losses = [3.0, 2.0, 2.0, None, 2.5, 1.0, 1.5]
    history, waited = EvalHistory(), []
    for step, loss in enumerate(losses, 1):
        history.add(step, loss)
        waited.append(history.waited)
    assert waited == [0, 0, 1, 2, 3, 0, 1]
    assert history.lowest == (6, 1.0)
    endless = EvalHistory()
    for step, loss in enumerate([math.inf, math.nan, 2.0, math.nan, 3.0], 1):
        endless.add(step, loss)
    assert (endless.lowest, endless.waited) == ((3, 2.0), 2)
    lines = [{"step": n, "eval_loss": loss} for n, loss in enumerate(losses, 1)]
    again = EvalHistory([*lines, {"step": 8, "loss": 0.1}])
    assert (again.lowest, again.waited) == (history.lowest, history.waited)
    assert again.has_waited(1) and not again.has_waited(2) and not again.has_waited(None)
