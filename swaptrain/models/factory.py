"""The plain constructor of the user's model, and what it raises, said in one line."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from swaptrain.config.model import ModelConfig
from swaptrain.errors import ConfigError, SwaptrainError
from swaptrain.models.stored.checkpoint import Checkpoint, open_weights
from swaptrain.models.stored.own_names import OwnNames

__all__ = ["Factory", "described", "python_factory"]

_LIBRARIES = (
    f"{Path(__file__).parents[1]}/",  # swaptrain itself
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


@dataclass(frozen=True)
class Factory:
    """The plain constructor of the user's model."""

    make: Callable[[], nn.Module]
    vocabulary: int | None
    """Size of the vocabulary, when the model says it."""
    description: str
    checkpoint: Callable[[], Checkpoint | None] = lambda: None
    """Opens the weights that it begins from; None: those that it makes. Raises ConfigError."""
    grow: Callable[[nn.Module], None] | None = None
    """Adds rows for the tokens that only the tokenizer has, to a model that has its weights."""
    positions: tuple[str, int] | None = None
    """How many positions the model says that it has, and its name for that."""
    fewer_layers: Callable[[int], Factory | None] = lambda _: None
    """Gives the same architecture with at most so many layers; None where it has no more."""
    keeps_rows_apart: Callable[[], bool] = lambda: False
    """Tries whether rows that share a sequence stay apart; False where that cannot be tried."""
    reads_padding: Callable[[], bool] = lambda: False
    """Tries whether a row's loss changes with its padding; False where that cannot be tried."""
    classes: Callable[[], str] = lambda: ""
    """Says which other classes do the job, where the model turns out to give no loss."""
    own_names: OwnNames | None = None
    """Finds the checkpoint's tensors; None: transformers' rules do."""


def python_factory(config: ModelConfig) -> Factory:
    """Return the function that `model.python` names, called with its `kwargs`.

    Raises ConfigError when it does not exist; what it raises itself becomes one, too.
    """
    path, kwargs, weights = str(config.python), dict(config.kwargs), config.weights
    function = _import(path)
    return Factory(
        lambda: _module(function, kwargs, path),
        None,
        path,
        checkpoint=lambda: None if weights is None else open_weights(weights),
        own_names=OwnNames(config.weights_except or ()),
    )


def described(error: Exception) -> str:
    """Return the error in one line, with the innermost line of the user's own code."""
    message = " ".join(str(error).split())
    name = type(error).__name__
    text = f"{name}: {message}" if message else name
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_LIBRARIES, "<"))]
    if not own:
        return text
    path, here = Path(own[-1].filename), Path.cwd()
    return f"{text} ({path.relative_to(here) if here in path.parents else path}:{own[-1].lineno})"


def _import(path: str) -> Callable[..., Any]:
    """Return the function at `package.module:function`; the current directory is importable."""
    module_name, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"model.python: {path!r} is not of the form package.module:factory")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's: it may raise anything
        raise ConfigError(
            f"model.python: cannot import {module_name!r}: {described(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"model.python: {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]  # callable() narrows Any to a bare callable


def _module(function: Callable[..., Any], kwargs: Mapping[str, Any], path: str) -> nn.Module:
    try:
        module = function(**kwargs)
    except SwaptrainError:
        raise
    except Exception as error:  # the function is the user's: it may raise anything
        raise ConfigError(f"model.python: {path} failed: {described(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model.python: {path} returned {type(module).__name__}, not a torch.nn.Module"
        )
    return module
