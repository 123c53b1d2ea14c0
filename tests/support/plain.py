"""Runs of plain PyTorch that several tests compare with, made once."""

from __future__ import annotations

import json
from copy import deepcopy

from swaptrain.config.schema import Config
from swaptrain.reference import ReferenceResult
from tests.support.runs import reference

__all__ = ["PlainRuns"]


class PlainRuns:
    """The reference runs of a session, by all that they depend on."""

    def __init__(self) -> None:
        self._made: dict[str, ReferenceResult] = {}

    def of(self, config: Config) -> ReferenceResult:
        """Return a copy of what `reference` returns, which the caller may spoil."""
        key = _key(config)
        if key not in self._made:
            self._made[key] = reference(config)
        return deepcopy(self._made[key])


def _key(config: Config) -> str:
    """Return the model, the data and what plain PyTorch is told; not how swaptrain goes about it.

    The data are a function's: a file may have changed since.
    """
    assert config.data.python is not None
    config = config.resolved()
    train = config.train.model_dump(
        include={"steps", "seed", "threads", "loss_weighting", "freeze"}
    )
    sections = (config.model, config.lora, config.data, config.eval, config.optimizer)
    dumped = [s and s.model_dump(mode="json") for s in sections]
    return json.dumps([*dumped, train], sort_keys=True)
