"""The config that is made of another tool's file, with what is to be said about it."""

from __future__ import annotations

from typing import Any

from swaptrain.config.commented import CommentedConfig, shown
from swaptrain.migrate.given import Given

__all__ = ["Draft"]


class Draft:
    """Keys that are set, and remarks on what is another thing here."""

    def __init__(self, given: Given, tool: str) -> None:
        self.given, self.tool = given, tool
        self.config = CommentedConfig()
        self.first: list[str] = []
        """What has to be done before the config can be used."""
        self.remarks: list[str] = []
        """What differs and changes the result: each with what to do."""

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Set a key; `comment` names what it was made of."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        self.config.set(key, value, comment)

    def default(self, key: str, value: Any) -> None:
        """Set a key to the tool's own default, where swaptrain's is another one."""
        self.set(key, value, f"default of {self.tool}")

    def do_first(self, why: str, command: str) -> None:
        """Ask for a command before the config is used; it is said once."""
        lines = [f"First: {why}", f"    {command}"]
        if lines[1] not in self.first:
            self.first += lines

    def remark(self, name: str, value: Any, text: str) -> None:
        """Say of a key of theirs, and its value, what is another thing here."""
        self.remarks.append(f"  {shown(name)}: {shown(value)}: {text}")

    def say(self, text: str) -> None:
        """Say what is another thing here, of no key of theirs."""
        self.remarks.append(f"  {text}")
