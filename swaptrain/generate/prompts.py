"""Prompts become tokens, and tokens text, by the tokenizer of a run's data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swaptrain.chat import (
    ChatTemplate,
    RowError,
    open_backend,
    read_template,
    render_prompts,
    special_tokens,
)
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError

__all__ = ["Prompt", "PromptCodec", "read_prompts"]

_BYTES_END = 256
"""What ends a document where a token is a byte."""


@dataclass(frozen=True)
class Prompt:
    """A text to go on with, or the messages of a conversation to answer."""

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()

    def shown(self) -> Any:
        """Return it as plain values for JSON."""
        return self.text if self.text is not None else [dict(m) for m in self.messages]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file: one a line, or JSON Lines with `prompt` or `messages`.

    Raises ConfigError with the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        found = [Prompt(line) for line in lines if line.strip()]
    else:
        found = [_row(line, f"--prompts {path}: line {n}") for n, line in enumerate(lines, 1)]
    if not found:
        raise ConfigError(f"--prompts {path}: it has no prompt")
    return found


def _row(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if isinstance(row, str):
        return Prompt(row)
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return Prompt(row["prompt"])
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return Prompt(messages=tuple(messages))
    raise ConfigError(f"{where}: give an object with prompt, a text, or with messages")


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("role"), str)


class PromptCodec:
    """The tokenizer of a run: that of `data.tokenizer`, else of the directory of `model.hf`.

    With `is_chat` a text is a message of the user, by the chat template. Raises ConfigError.
    """

    def __init__(self, config: Config, *, is_chat: bool = False, tokenizer: Path | None = None):
        self._is_chat = is_chat
        self._backend: Any = None
        self._template: ChatTemplate | None = None
        self._rendered: dict[str, str] = {}
        """Texts of conversations, by their JSON."""
        self.end_id: int | None = _BYTES_END
        source = tokenizer or _directory(config)
        if source is None:
            if is_chat:
                raise ConfigError("--chat: a chat template belongs to a tokenizer; here a byte is "
                                  "a token")  # fmt: skip
            self.pad_id = _BYTES_END
            return
        self._backend = open_backend(source)
        special = special_tokens(source)
        found = {key: self._backend.token_to_id(text) for key, text in special.items()}
        self.end_id = found.get("eos_token")
        if self.end_id is None:
            self.end_id = found.get("sep_token")
        self.pad_id = next(i for i in (found.get("pad_token"), self.end_id, 0) if i is not None)
        template = read_template(source, config.data.chat_template)
        self._template = None if template is None else ChatTemplate(template, special)

    @property
    def has_template(self) -> bool:
        """Whether it can write conversations."""
        return self._template is not None

    def encode(self, prompts: Sequence[Prompt], *, left: bool) -> tuple[Tensor, Tensor]:
        """Return ids [prompts, length] and the mask of what is no padding, which lies `left`."""
        self._render(prompts)
        rows = [self._ids(prompt) for prompt in prompts]
        if not all(rows):
            raise ConfigError("a prompt is empty: give it a word to go on from")
        length = max(map(len, rows))
        ids = torch.full((len(rows), length), self.pad_id)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            place = slice(length - len(row), length) if left else slice(len(row))
            ids[number, place] = torch.tensor(row)
            mask[number, place] = 1
        return ids, mask

    def decode(self, ids: Any, **_: Any) -> str:
        """Return the text of tokens, without special ones."""
        found = ids.tolist() if isinstance(ids, Tensor) else ids
        values = [found] if isinstance(found, int) else list(found)  # a streamer asks for one too
        if self._backend is None:
            return bytes(i for i in values if i < _BYTES_END).decode("utf-8", errors="replace")
        text: str = self._backend.decode(values, skip_special_tokens=True)
        return text

    def _ids(self, prompt: Prompt) -> list[int]:
        messages = self._messages(prompt)
        if messages is not None:
            text = self._rendered[json.dumps(messages)]
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        assert prompt.text is not None, "a prompt is a text or a conversation"
        if self._backend is None:
            return list(prompt.text.encode())
        return list(self._backend.encode(prompt.text, add_special_tokens=True).ids)

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """Return a prompt as the conversation that it is; None for a text to go on with."""
        if prompt.text is None:
            return [dict(message) for message in prompt.messages]
        return [{"role": "user", "content": prompt.text}] if self._is_chat else None

    def _render(self, prompts: Sequence[Prompt]) -> None:
        """Let conversations become text, each once: a process begins for that."""
        new: dict[str, list[dict[str, Any]]] = {}
        for prompt in prompts:
            messages = self._messages(prompt)
            _check_characters([prompt.text, *(m.get("content") for m in messages or ())])
            if messages is not None and self._backend is None:
                raise ConfigError("messages need a tokenizer with a chat template: --tokenizer DIR")
            if messages is not None and json.dumps(messages) not in self._rendered:
                new[json.dumps(messages)] = messages
        if not new:
            return
        if self._template is None:
            raise ConfigError(
                "a conversation needs a chat template, and the tokenizer has none: name one in "
                "data.chat_template"
            )
        try:
            texts = render_prompts(self._template, list(new.values()))
        except RowError as error:
            raise ConfigError(f"a prompt cannot be written: {error}") from error
        self._rendered.update(zip(new, texts, strict=True))


def _check_characters(texts: Iterable[Any]) -> None:
    """Raise ConfigError for a text that holds half of a pair, or bytes that are no UTF-8."""
    for text in texts:
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start : error.end]
            raise ConfigError(f"the prompt holds {half!r}, which is no character") from error


def _directory(config: Config) -> Path | None:
    """Return where the tokenizer lies; None where a token is a byte."""
    data = config.data
    if str(data.tokenizer) != "bytes":
        return Path(data.tokenizer)
    if data.text is not None:
        return None
    source = config.model.hf
    if isinstance(source, str | Path) and (Path(source) / "tokenizer.json").is_file():
        return Path(source)
    raise ConfigError(
        "the run's data are tokens, and no tokenizer is known: name one with --tokenizer DIR"
    )
