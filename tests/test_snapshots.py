"""Snapshots: what they hold, going back to them, and what changes between two starts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swaptrain.store.snapshots import list_snapshots
from tests.support.killing import final_state, metrics_key
from tests.support.runs import config_of, trained

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "16KiB"},
    "train": {"steps": 7},
}
CNN: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"segment": "4KiB"},
    "train": {"steps": 7},
}
CLIPPED = {"optimizer": {"clip_norm": 0.3}}
MODES = {
    "fused": GPT,
    "clipped": {**CNN, **CLIPPED},
    "trees": {**GPT, "store": {"commit_every": 3}},
    "trees-clipped": {**CNN, **CLIPPED, "store": {"commit_every": 3}},
}


def keeping(tree: dict[str, Any], every: int = 2, last: int = 2, **train: Any) -> dict[str, Any]:
    """Return the config with snapshots."""
    store = {**tree.get("store", {}), "keep": {"every": every, "last": last}}
    return {**tree, "store": store, "train": {**tree["train"], **train}}


def steps(run_dir: Path) -> list[int]:
    return [snapshot.step for snapshot in list_snapshots(run_dir)]


def same_end(left: Path, right: Path) -> None:
    assert metrics_key(left) == metrics_key(right)
    assert final_state(left) == final_state(right)


@pytest.mark.parametrize("mode", MODES)
def test_going_back_and_on_again_changes_no_bit(mode: str, tmp_path: Path) -> None:
    """A run with snapshots ends as one without, and so it does from each of its snapshots."""
    whole = trained(config_of(tmp_path / "whole", MODES[mode]))
    config = config_of(tmp_path / "run", keeping(MODES[mode]))
    run_dir = trained(config)
    same_end(run_dir, whole)
    assert steps(run_dir) == [4, 6]
    for step in (6, 4):
        trained(config, from_step=step)
        same_end(run_dir, whole)
        assert steps(run_dir) == [4, 6]
