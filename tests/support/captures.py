"""Captured models that several trainings of a session begin from, each captured once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from swaptrain.config.schema import Config
from swaptrain.given import PREFIX
from swaptrain.models.build import BuiltModel, build
from swaptrain.models.factory import Factory

__all__ = ["Captures"]


_OF_A_RUN = ("buffers", "draw", "note", "thawed")
"""What a run that goes on is given to be captured without its constructor's draws."""


class Captures:
    """What `build` returned, by all that it depends on; a model's code is taken to stay the same.

    What begins from files, or is an object of a script, is captured each time: another one may have
    the same name.
    """

    def __init__(self) -> None:
        self._made: dict[str, BuiltModel] = {}

    def build(
        self,
        config: Config,
        factory: Factory,
        batch: Mapping[str, torch.Tensor],
        **given: Any,
    ) -> BuiltModel:
        """Return what `build` returned for the like, whose initial weights can be made again."""
        files = (config.model.weights, config.lora and config.lora.source)
        is_object = (config.model.python or "").startswith(PREFIX)
        if isinstance(config.model.hf, str) or any(files) or is_object:
            return build(config, factory, batch, **given)
        options = {name: value for name, value in given.items() if name not in _OF_A_RUN}
        key = _key(config, batch, options)
        built = self._made.get(key)
        if built is None or not _has(built, given.get("buffers")):
            built = build(config, factory, batch, **given)
            if not given.get("draw", True):
                return built
            built.initial.forget = lambda: None  # type: ignore[method-assign]
            self._made[key] = built
        return replace(built)


def _has(built: BuiltModel, buffers: Mapping[str, Any] | None) -> bool:
    """Whether the buffers that a run has recorded are those that the constructor makes."""
    own = dict(built.initial.module.named_buffers())
    found = ((own[name], value) for name, value in (buffers or {}).items() if name in own)
    return all(torch.equal(buffer, torch.tensor(value)) for buffer, value in found)


def _key(config: Config, batch: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> str:
    held_out = options.get("held_out")
    sizes = held_out and [held_out.sizes(config.data.micro_batch), _described(held_out.example)]
    others = {name: value for name, value in options.items() if name != "held_out"}
    module = sys.modules.get((config.model.python or "").partition(":")[0])
    train = config.train.model_dump(exclude={"steps", "recompute", "check_capture"})
    sections = [config.model.model_dump(), config.lora and config.lora.model_dump(), train]
    return json.dumps(
        [*sections, _described(batch), sizes, others, module and module.__file__],
        sort_keys=True,
        default=str,
    )


def _described(batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {key: (str(value.dtype), value.tolist()) for key, value in batch.items()}
