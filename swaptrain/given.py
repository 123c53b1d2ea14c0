"""Objects that a script has handed over, where a config finds them: `swaptrain.given:NAME`.

A config names what makes a model or data as `package.module:function`. What has no such name, as a
lambda, a class of a notebook or a dataset that exists already, is here while `train` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["PREFIX", "handed_over"]

PREFIX = f"{__name__}:"
_functions: dict[str, Callable[..., Any]] = {}


@contextmanager
def handed_over(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let a config find these functions under `swaptrain.given:NAME` while the block runs."""
    before = {name: _functions[name] for name in functions if name in _functions}
    _functions.update(functions)
    try:
        yield
    finally:
        for name in functions:
            _functions.pop(name, None)
        _functions.update(before)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return _functions[name]
    except KeyError:
        from swaptrain.errors import ConfigError

        raise ConfigError(
            f"the {name} of this run was handed over by a Python script, as swaptrain.train("
            f"{name}=...): run that script again, or give a function that a process can import"
        ) from None
