"""`train.freeze`: parameters that stay as they begin, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from swaptrain.errors import ConfigError

__all__ = ["freeze", "nearest"]

_MOST = 3
"""How many names a message lists."""


def freeze(module: nn.Module, patterns: Sequence[str], *, all_match: bool = True) -> None:
    """Take the gradient from the parameters whose name matches one of some globs.

    `*` stands for anything, dots included. A tied parameter is frozen by any of its names. With
    `all_match` False a pattern may match nothing: for a model that has some of the layers only.
    Raises ConfigError for a pattern that matches nothing, and where nothing is left to train.
    """
    if not patterns:
        return
    named = dict(module.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [name for name in named if fnmatchcase(name, pattern)]
        if not found and all_match:
            raise ConfigError(
                f"train.freeze: {pattern!r} matches no parameter; {nearest(pattern, list(named))}"
            )
        for name in found:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(
            f"train.freeze: {_quoted(patterns)} freeze all {len(dict(module.named_parameters()))} "
            f"parameters, and nothing is left to train: leave out some, such as {list(named)[-1]}"
        )


def nearest(pattern: str, names: Sequence[str]) -> str:
    """Say which names are the nearest to a glob that matches none."""
    near = get_close_matches(pattern.strip("*"), names, n=_MOST, cutoff=0.0)
    return f"the nearest are {', '.join(near)}" if near else "the model has none"


def _quoted(patterns: Sequence[str]) -> str:
    return ", ".join(map(repr, patterns))
