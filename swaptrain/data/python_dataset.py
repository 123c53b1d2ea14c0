"""Any data at all: a map-style dataset made by a function that the config names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from swaptrain.data.batches import Dataset
from swaptrain.errors import ConfigError

__all__ = ["load_collate", "load_dataset"]


def load_dataset(target: str, kwargs: Mapping[str, Any], *, key: str = "data.python") -> Dataset:
    """Call `package.module:function` with `kwargs` and return the map-style dataset it gives.

    Modules in the current directory are found. Raises ConfigError if the module does not import,
    the name is not there or not callable, the call fails, or what it returns has no length or
    cannot be indexed.
    """
    found = _function(target, key)
    try:
        dataset = found(**kwargs)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{key}: {target} failed: {type(error).__name__}: {error}") from error
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise ConfigError(
            f"{key}: {target} returned {type(dataset).__name__}, which has no"
            f" {' and no '.join(missing)}: return a map-style dataset (torch.utils.data.Dataset)"
        )
    try:
        len(dataset)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{key}: the dataset of {target} has no length: {type(error).__name__}: {error}"
        ) from error
    return cast(Dataset, dataset)


def load_collate(
    target: str | None, *, key: str = "data.collate"
) -> Callable[[list[Any]], Any] | None:
    """Return the function at `package.module:function`; None for None. Raises ConfigError."""
    return None if target is None else cast("Callable[[list[Any]], Any]", _function(target, key))


def _function(target: str, key: str) -> Callable[..., Any]:
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"{key}: {target!r} is not of the form package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{key}: {module_name} does not import from {here}: {type(error).__name__}: {error}"
        ) from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}: {module_name} has no {function_name}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key}: {target} is not a function but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function
