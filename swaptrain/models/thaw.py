"""Parameters that a constructor freezes and transformers trains when it loads a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = ["thaw", "thawed_by_loading"]


def thawed_by_loading(module: nn.Module, missing: Collection[str]) -> tuple[str, ...]:
    """Return the frozen parameters that `from_pretrained` would give a gradient.

    It puts new parameters into the places of the constructor's, and whether these are frozen too
    depends on its version. `missing` are those that the checkpoint has not.
    """
    frozen = [
        name
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and parameter.is_floating_point()
    ]
    if not frozen:
        return ()
    loaded, absent = _trains()
    return tuple(name for name in frozen if (absent if name in missing else loaded))


def thaw(module: nn.Module, names: Iterable[str]) -> None:
    """Let parameters be trained that the constructor froze."""
    for name in names:
        module.get_parameter(name).requires_grad_(True)


@cache
def _trains() -> tuple[bool, bool]:
    """Load a frozen parameter and one that is missing, and return whether each has a gradient."""
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.utils import logging

    class _Probe(PreTrainedModel):  # type: ignore[misc]  # transformers has no types
        config_class = PretrainedConfig
        base_model_prefix = ""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.loaded = nn.Parameter(torch.zeros(1), requires_grad=False)
            self.missing = nn.Parameter(torch.zeros(1), requires_grad=False)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """Leave the values as they are."""

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        state = {"loaded": torch.ones(1)}
        found = _Probe.from_pretrained(None, config=PretrainedConfig(), state_dict=state)
    finally:
        if shown:
            logging.enable_progress_bar()
    return found.loaded.requires_grad, found.missing.requires_grad
