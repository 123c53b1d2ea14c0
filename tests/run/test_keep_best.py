"""`store.keep.best`: the steps of lowest held-out loss stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.store.slots.snapshots import list_snapshots
from swaptrain.verbs.export import export_weights
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, rows, trained, weights
from tests.whole.test_exactness import LLAMA

TEXT = {"python": "tests.support.datasets:text"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": {"optimizer": {"clip_norm": 0.1, "name": "sgd", "lr": 30.0}},
    "trees": {"commit": {"every": 3}},
    "step": {"commit": {"unit": "step"}},
}


def job(run_dir: Path, settings: str = "fused", steps: int = 6, **keep: Any) -> Config:
    """Return a run whose loss goes up and down."""
    tree: dict[str, Any] = {"model": {"hf": LLAMA}, "data": TEXT, "train": {"steps": steps}}
    tree |= {"optimizer": {"name": "sgd", "lr": 2.0}, "memory": {"segment": "128KiB"}}
    tree["eval"] = {**TEXT, "every": 1, "batches": 2}
    more = dict(SETTINGS[settings])
    tree["store"] = {"keep": keep or None}
    if "commit" in more:
        tree["store"]["commit"] = more.pop("commit")
    return config_of(run_dir, {**tree, **more})


@pytest.mark.trains
@pytest.mark.parametrize(
    "settings", proof_but(SETTINGS, "trees", whole=("fused", "step", "clipped"))
)
def test_the_best_steps_stay(settings: str, tmp_path: Path) -> None:
    """With the bits of a run that ended there, and without a change of the others."""
    run_dir = trained(job(tmp_path / "run", settings, best=2))
    losses = {row["step"]: row["eval_loss"] for row in rows(run_dir)}
    best = sorted(sorted(losses, key=lambda step: losses[step])[:2])
    assert [one.step for one in list_snapshots(run_dir)] == best
    plain = trained(job(tmp_path / "plain", settings))
    assert_same_bits(weights(run_dir), weights(plain))
    for step in best:
        there = trained(job(tmp_path / f"to{step}", settings, steps=step))
        export_weights(run_dir, tmp_path / f"{step}.safetensors", None, from_step=step, note=print)
        export_weights(there, tmp_path / f"{step}.again.safetensors", None, note=print)
        first, again = (tmp_path / f"{step}{end}.safetensors" for end in ("", ".again"))
        assert first.read_bytes() == again.read_bytes()
    # What is wanted no longer goes at the next start.
    trained(job(tmp_path / "run", settings, steps=7, best=1))
    losses |= {row["step"]: row["eval_loss"] for row in rows(run_dir)}
    lowest = min(losses, key=lambda step: losses[step])
    assert [one.step for one in list_snapshots(run_dir)] == [lowest]


@pytest.mark.trains
def test_a_best_step_goes_where_nothing_is_evaluated_any_more(tmp_path: Path) -> None:
    """It was kept for its loss, which metrics.jsonl has, and is none of `every`."""
    run_dir = trained(job(tmp_path / "run", steps=3, best=1))
    (kept,) = list_snapshots(run_dir)
    tree = job(tmp_path / "run", steps=6, every=5, last=2).to_tree() | {"eval": None}
    trained(config_of(tmp_path / "run", tree))
    assert kept.step < 5
    assert [one.step for one in list_snapshots(run_dir)] == [5]


def test_what_measures_nothing_is_refused(tmp_path: Path) -> None:
    """Neither rule; the best of no evaluation."""
    config = job(tmp_path / "run")
    tree = config.to_tree() | {"eval": None}
    with pytest.raises(ConfigError, match=r"store\.keep\.best keeps steps of lowest"):
        config_of(tmp_path / "run", tree | {"store": {"keep": {"best": 1}}})
    with pytest.raises(ConfigError, match="give every"):
        config_of(tmp_path / "run", tree | {"store": {"keep": {"last": 3}}})
