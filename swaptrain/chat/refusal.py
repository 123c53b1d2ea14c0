"""What is wrong with a row of a file: where, what, and what to do."""

from __future__ import annotations

from swaptrain.errors import ConfigError

__all__ = ["RowError", "refused"]


class RowError(ValueError):
    """A row cannot be taken; the message says why, and follows the name of its place."""


def refused(key: str, path: str, place: str, why: object) -> ConfigError:
    """Return the refusal of a file for one of its rows; `place` is such as `line 7`."""
    where = f"{path}, {place}" if place else path
    return ConfigError(f"{key}: {where}: {why}")
