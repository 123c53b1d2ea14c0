"""Small real runs in every state, made once, whose copies a test may damage and go on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import swaptrain.verbs.train as training
from swaptrain.config.schema import Config
from swaptrain.errors import RunError
from swaptrain.planning.prepare import Prepared
from swaptrain.store.slots.slots import Slots
from tests.support.runs import config_of, trained, weights

__all__ = ["MLP", "STATES", "Job", "small_run"]

MLP: dict[str, Any] = {
    "model": {"python": "tests.support.models:frozen_mlp"},
    "data": {"python": "tests.support.datasets:vectors"},
    "memory": {"host": "64MiB", "segment": "2KiB"},
    "train": {"steps": 2},
}
CODED: dict[str, Any] = {
    **MLP,
    "model": {"python": "tests.support.models:wide_mlp", "dtype": "bfloat16"},
    "memory": {"host": "64MiB", "segment": "24KiB"},
    "optimizer": {"state": "8bit"},
}
"""A run whose moments are codes with scales."""
NO_MASTER: dict[str, Any] = {
    **CODED,
    "model": {**CODED["model"], "master": "none"},
    "memory": {"host": "64MiB", "segment": "64KiB"},
    "store": {"chunk": "8KiB"},  # updated in parts
}
FLOAT16: dict[str, Any] = {
    **CODED,
    "model": {**CODED["model"], "dtype": "float16"},
    "optimizer": {"state": "bfloat16"},
}
"""A run whose loss is scaled, with moments in bfloat16."""
STATES: dict[str, tuple[dict[str, Any], int | None]] = {
    "finished": (MLP, None),
    "inside a step": (MLP, 4),
    "update pending": ({**MLP, "optimizer": {"clip_norm": 0.1}}, 4),
    "two trees": ({**MLP, "store": {"commit": {"every": 2}}, "train": {"steps": 4}}, 7),
    "coded, finished": (CODED, None),
    "coded, update pending": ({**CODED, "optimizer": {"state": "8bit", "clip_norm": 0.1}}, 6),
    "coded, no master": (NO_MASTER, 6),
    "scaled, update pending": (FLOAT16, 6),
}
"""By name: the config, and the number of the switch in which the disk fails, if it does."""


@dataclass
class Job:
    """A run in one state, what it was prepared from, and how it ends."""

    config: Config
    template: Path
    prepared: Prepared
    expected: dict[str, Tensor]

    @property
    def largest(self) -> str:
        """The name of a parameter of the most elements."""
        names = [name for name in self.expected if f"optimizer.{name}.exp_avg" in self.expected]
        return max(names, key=lambda name: self.expected[name].numel())

    def copy(self) -> Path:
        """Put a fresh copy of the run into its run directory."""
        shutil.rmtree(self.config.run.dir, ignore_errors=True)
        shutil.copytree(self.template, self.config.run.dir, symlinks=True)
        return self.config.run.dir

    def resume(self) -> None:
        """Go on with the run, without capturing its model again."""
        original: Any = training.Prepared
        training.Prepared = lambda *_: self.prepared  # type: ignore[assignment,misc]
        try:
            training.train(self.config)
        finally:
            training.Prepared = original  # type: ignore[misc]

    def weights(self) -> dict[str, Tensor]:
        """Return the masters of the run's last commit, and what the optimizer holds of them."""
        return weights(self.config.run.dir, state=True)


def small_run(folder: Path, state: str) -> Job:
    """Make a run in one of STATES."""
    tree, fails_at = STATES[state]
    config = config_of(folder / "run", tree)
    if fails_at is None:
        trained(config)
    else:
        _fail_at(fails_at, lambda: trained(config))
    template = folder / "template"
    shutil.copytree(config.run.dir, template, symlinks=True)
    prepared = Prepared(config.resolved(), None, lambda _: None)
    job = Job(config, template, prepared, {})
    job.resume()
    job.expected = job.weights()
    return job


def _fail_at(number: int, run: Callable[[], object]) -> None:
    done = 0
    switch, switch_tree = Slots.switch, Slots.switch_tree

    def count() -> None:
        nonlocal done
        done += 1
        if done == number:
            raise RunError("the disk has gone")

    def failing(slots: Slots, *args: Any, **options: Any) -> None:
        count()
        switch(slots, *args, **options)

    def failing_tree(slots: Slots) -> None:
        count()
        switch_tree(slots)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError, match="has gone"):
        patch.setattr(Slots, "switch", failing)
        patch.setattr(Slots, "switch_tree", failing_tree)
        run()
