"""Code is not taken from a run directory: it may come from somebody else."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError

__all__ = ["refuse_code"]

_KEYS = {
    "model": ("python",),
    "data": ("python", "collate"),
    "eval": ("python",),
}
"""By section the keys that name a function, which would be called."""


def refuse_code(
    config: Config, run: Path, sections: Collection[str], *, given: Collection[str] = (), cure: str
) -> None:
    """Raise ConfigError, with the `cure`, where the recorded config of a run names code.

    Dotted keys in `given` are the user's own.
    """
    for section in sections:
        for name in _KEYS[section]:
            key, found = f"{section}.{name}", getattr(getattr(config, section), name, None)
            if found is not None and key not in given:
                raise ConfigError(
                    f"{key} of {run} is {found}, and code is not taken from a run directory: {cure}"
                )
