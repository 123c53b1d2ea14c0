"""A disk whose requests take long, now and then very long: nothing times out, no bit changes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.planning.prepare import Prepared
from swaptrain.units import MIB
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights

pytestmark = pytest.mark.trains

MODES: dict[str, dict[str, Any]] = {
    "fused": {},
    "saving": {"train": {"recompute": False}},
    "clipped": {"optimizer": {"clip_norm": 0.3}},
    "trees": {"store": {"commit": {"every": 2}}},
}


class SlowDisk:
    """Delays each request by a random time, so that they end in another order than they began."""

    def __init__(self, stall_s: float) -> None:
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._stall_s = stall_s
        self.requests = self.stalls = 0

    def late(self, call: Callable[..., int]) -> Callable[..., int]:
        """Return the same system call, some time later."""

        def called(*args: Any) -> int:
            self._wait()
            return call(*args)

        return called

    def _wait(self) -> None:
        with self._lock:
            self.requests += 1
            delay_s = self._random.choice((0.0, 0.0, 0.001, 0.005, 0.02))
            if self.requests % 31 == 20:
                self.stalls += 1
                delay_s = self._stall_s
        time.sleep(delay_s)


def _config(run_dir: Path, mode: str, host_bytes: int = 256 * MIB) -> Config:
    tree = {
        "model": {"python": "tests.support.models:gpt", "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:tokens"},
        **MODES[mode],
    }
    tree["train"] = {"steps": 3, "seed": 3, "threads": 1, **tree.get("train", {})}
    tree["memory"] = {"host": f"{host_bytes >> 10}KiB", "segment": "100KiB"}
    return config_of(run_dir, tree)


@pytest.mark.parametrize("mode", proof_but(MODES, whole=("fused", "clipped")))
def test_a_disk_that_makes_everybody_wait_changes_nothing(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and weights are those of an undisturbed run, with little more memory than needed."""
    undisturbed = trained(_config(tmp_path / "undisturbed", mode))
    slow = SlowDisk(stall_s=0.5)
    monkeypatch.setattr(os, "preadv", slow.late(os.preadv))
    monkeypatch.setattr(os, "pwritev", slow.late(os.pwritev))
    plan = Prepared(_config(tmp_path / "planned", mode), None, lambda _: None).plan
    waited = trained(_config(tmp_path / "waited", mode, plan.least_host_bytes + 2 * MIB))
    assert slow.stalls > 1
    assert losses(waited) == losses(undisturbed)
    assert_same_bits(weights(waited), weights(undisturbed))
