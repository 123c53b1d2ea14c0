"""A chat template: the text that a conversation becomes, in transformers' sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.chat.refusal import RowError
from swaptrain.chat.rows import Message
from swaptrain.errors import ConfigError
from swaptrain.strict_json import read_json
from swaptrain.units import MIB

__all__ = ["Characters", "ChatTemplate", "read_template"]

Characters = tuple[int, int]
"""Characters [begin, end) of a text."""

_FILE = "chat_template.jinja"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MOST_BYTES = 16 * MIB


@dataclass(frozen=True)
class ChatTemplate:
    """The source of a template, and the special tokens that it may name."""

    source: str
    special: Mapping[str, str]

    @property
    def marks_turns(self) -> bool:
        """Whether it says by `{% generation %}` what the assistant writes."""
        return _MARKS.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        *,
        prompt: bool = False,
    ) -> str:
        """Return the text; with `prompt` it ends where the assistant begins. Raises RowError."""
        return self._render(messages, tools, prompt, marked=False)[0]

    def render_marked(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[Characters]]:
        """Return the text, and what stands within `{% generation %}`."""
        return self._render(messages, tools, False, marked=True)

    def _render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        prompt: bool,
        *,
        marked: bool,
    ) -> tuple[str, list[Characters]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self.special,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is somebody else's: it may raise anything
            raise RowError(f"the chat template refuses it: {_line(error)}") from error
        return texts[0], spans[0] if marked else []


def read_template(directory: Path, given: str | None, *, tools: bool = False) -> str | None:
    """Return the source of a tokenizer's template, or of `given`: a file's name, or Jinja itself.

    `tools`: the one for rows with tools, where the tokenizer has one of its own. None where there
    is none. Raises ConfigError.
    """
    if given is not None:
        if "{{" in given or "{%" in given:
            return given
        return _read(Path(given), "data.chat_template")
    file = directory / _FILE
    if file.is_file():
        extra = directory / "additional_chat_templates" / "tool_use.jinja"
        return _read(extra if tools and extra.is_file() else file, "data.tokenizer")
    config = directory / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        found = read_json(config, _MOST_BYTES).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"data.tokenizer: {config} is not a JSON object: {error}") from error
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("tool_use" if tools and "tool_use" in named else "default")
    return found if isinstance(found, str) else None


def _read(file: Path, key: str) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(_MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot read {file}: {error.strerror}; give a file, or Jinja, with {{{{ }}}}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {file} is not UTF-8 (byte {error.start})") from error


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
