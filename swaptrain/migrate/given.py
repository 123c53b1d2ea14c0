"""The keys of another tool's file, and which of them have been read."""

from __future__ import annotations

from typing import Any

from swaptrain.config.commented import shown
from swaptrain.config.kinds import describe
from swaptrain.config.yaml_text import Tree
from swaptrain.errors import ConfigError

__all__ = ["ONE_ANSWER", "Given"]

ONE_ANSWER = "training here is on one answer, not on preferences or rewards"
"""Why files for other kinds of training are refused."""

_TRUE, _FALSE = ("true", "yes", "on", "y"), ("false", "no", "off", "n")
"""Words of YAML 1.1, which these tools read their files with."""


class Given:
    """Keys and values; null and empty text count as absent, as these tools take them."""

    def __init__(self, source: str, tree: Tree) -> None:
        self.source = source
        self._values: dict[str, Any] = tree.values
        self._where = tree.where
        self._read: set[str] = set()

    def take(self, *names: str) -> Any:
        """Return the value of the first of these keys that is there, None without one.

        All of them count as read.
        """
        self._read.update(names)
        return next((self._values[name] for name in names if self.has(name)), None)

    def has(self, name: str) -> bool:
        """Whether a key has a value; it does not count as read."""
        return self._values.get(name) not in (None, "", [], {})

    def flag(self, name: str) -> bool | None:
        """Return true or false, None where it is absent; raises ConfigError."""
        found = self.take(name)
        if found is None or isinstance(found, bool):
            return found
        word = str(found).lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise self.wrong(name, found, "true or false")

    def number(self, *names: str) -> float | None:
        """Return a number, None where it is absent; raises ConfigError."""
        found = self.take(*names)
        if found is None:
            return None
        try:
            if isinstance(found, bool):
                raise TypeError
            return float(found)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(self._name(names), found, "a number") from None

    def count(self, *names: str) -> int | None:
        """Return a whole number, None where it is absent; raises ConfigError."""
        value = self.number(*names)
        if value is None:
            return None
        if not value.is_integer():
            raise self.wrong(self._name(names), self.take(*names), "a whole number")
        return int(value)

    def text(self, *names: str) -> str | None:
        """Return text, None where it is absent; raises ConfigError."""
        found = self.take(*names)
        if found is None or isinstance(found, str):
            return found
        raise self.wrong(self._name(names), found, "text")

    def texts(self, *names: str) -> list[str]:
        """Return a list of texts; one text is split at its commas. Raises ConfigError."""
        found = self.take(*names)
        if isinstance(found, str):
            return [part.strip() for part in found.split(",") if part.strip()]
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(part, str) for part in found):
            raise self.wrong(self._name(names), found, "a list of texts")
        return found

    def left(self) -> dict[str, Any]:
        """Return what has a value and was not read."""
        return {
            name: value
            for name, value in self._values.items()
            if name not in self._read and self.has(name)
        }

    def wrong(self, name: str, found: Any, wanted: str) -> ConfigError:
        """Return the refusal of a key's value."""
        where = self._where.get((name,), "")
        place = f"{where}: " if where else ""
        return ConfigError(
            f"{self.source}: {place}{name}: found {describe(found)}; wanted {wanted}"
        )

    def refusal(self, name: str, why: str) -> ConfigError:
        """Return the refusal of a file for what a key says."""
        where = self._where.get((name,), "")
        place = f"{where}: " if where else ""
        value = shown(self._values.get(name))
        return ConfigError(f"{self.source}: {place}{name}: {value}: {why}")

    def _name(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if self.has(name)), names[0])
