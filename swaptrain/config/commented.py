"""A config as text with comments: what a person reads, and goes on to edit."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from swaptrain.config.schema import Config
from swaptrain.config.yaml_text import one_line_yaml

__all__ = ["CommentedConfig", "shown"]

_COLUMNS = 100
_COMMENT_COLUMN = 34
_MOST_SHOWN = 60
_COMMAND = " " * 4


class CommentedConfig:
    """Keys with a comment each, in the order of the sections of a config."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, tuple[Any, str]]] = {}

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key; a later value takes the place of an earlier one."""
        section, _, rest = key.partition(".")
        self._entries.setdefault(section, {})[rest] = (value, comment)

    def get(self, key: str) -> Any:
        """Return what a dotted key was set to; None where it was not."""
        section, _, rest = key.partition(".")
        return self._entries.get(section, {}).get(rest, (None, ""))[0]

    def text(self, head: Sequence[str], tail: Sequence[str]) -> str:
        """Return the YAML; each item of `head` and `tail` is a paragraph of comment."""
        lines = [line for item in head for line in comment_lines(item)]
        for section in Config.model_fields:
            if section in self._entries:
                lines += ["", f"{section}:", *self._section(self._entries[section])]
        lines += [""] * bool(tail)
        lines += [line for item in tail for line in comment_lines(item)]
        return "\n".join(lines) + "\n"

    def _section(self, entries: dict[str, tuple[Any, str]]) -> list[str]:
        lines: list[str] = []
        above: list[str] = []
        # Keys of an inner section lie together, after the others.
        for key in sorted(entries, key=lambda key: key.rpartition(".")[0]):
            *inner, name = key.split(".")
            for depth, word in enumerate(inner):
                if inner[: depth + 1] != above[: depth + 1]:
                    lines.append(f"{'  ' * (depth + 1)}{word}:")
            above = inner
            indent = "  " * (len(inner) + 1)
            value, comment = entries[key]
            line = f"{indent}{name}: {one_line_yaml(value)}"
            beside = f"{line:<{_COMMENT_COLUMN - 1}} # {comment}"
            if not comment:
                lines.append(line)
            elif len(beside) <= _COLUMNS:
                lines.append(beside)
            else:
                lines += [*comment_lines(comment, indent), line]
        return lines


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return a paragraph as lines of comment; a command, indented by four, is not wrapped."""
    lines = []
    for line in text.splitlines() or [""]:
        if line.startswith(_COMMAND):
            lines.append(f"{indent}# {line}")
            continue
        inner = " " * (len(line) - len(line.lstrip()))
        wrapped = wrap(
            line,
            _COLUMNS - len(indent) - 2,
            subsequent_indent=inner + "  " * bool(inner),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [f"{indent}# {part}".rstrip() for part in wrapped or [""]]
    return lines


def shown(value: Any) -> str:
    """Return a value as a comment shows it: one line, and not too long."""
    text = one_line_yaml(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
