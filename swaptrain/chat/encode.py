"""A row becomes token ids: rendered, encoded, masked, as the config's `data` section says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from swaptrain.chat.refusal import RowError
from swaptrain.chat.rows import Conversation, Document, Prompted, Ready, Row, parse_row
from swaptrain.chat.template import ChatTemplate, read_template
from swaptrain.chat.tokens import ChatTokenizer, Encoded
from swaptrain.chat.turns import TrainOn, is_altered, trained_turns

__all__ = ["EncodeSettings", "RowEncoder"]

_DIGEST_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_CODE = "rows 1"
"""Goes up with every change of what a row becomes: earlier tokens are then made anew."""


@dataclass(frozen=True)
class EncodeSettings:
    """What decides the tokens of a row; sent to the processes that encode."""

    tokenizer: Path
    template: str | None = None
    """`data.chat_template`: a file, or Jinja; None: the tokenizer's own."""
    train_on: TrainOn | None = None
    """None: completions of rows that name them, turns of conversations, all of text."""
    mask_history: bool = False
    held_out: float = 0.0
    """The part of the rows that is left for evaluation."""
    takes_held_out: bool = False
    """Whether these are the rows that are taken."""
    most_row_s: float = 10.0
    """Processor time that a row may take."""
    most_chunk_s: int = 60
    """Of a process, beyond what it had taken, for the rows that it was given together: a
    computation that cannot be interrupted ends with the process."""

    def digest(self) -> str:
        """Name the mapping: equal digests, equal tokens. Raises ConfigError."""
        sources = [read_template(self.tokenizer, self.template, tools=t) for t in (False, True)]
        fields = (_CODE, sources, self.train_on, self.mask_history, self.held_out)
        hashed = xxhash.xxh3_128(repr((*fields, self.takes_held_out)).encode(errors="replace"))
        for name in _DIGEST_FILES:
            file = self.tokenizer / name
            if file.is_file():
                hashed.update(name.encode() + file.read_bytes())
        return hashed.hexdigest()

    def takes(self, content: bytes) -> bool:
        """Whether a row belongs to this part of the data: by a hash of its content."""
        if not self.held_out:
            return True
        place = xxhash.xxh3_64_intdigest(content.strip()) / 2**64
        return (place < self.held_out) == self.takes_held_out


class RowEncoder:
    """Encodes rows one at a time; raises ConfigError where tokenizer or template are missing."""

    def __init__(self, settings: EncodeSettings) -> None:
        self._settings = settings
        self.tokenizer = ChatTokenizer(settings.tokenizer)
        self._templates = [self._template(tools) for tools in (False, True)]

    def encode(self, content: bytes) -> Encoded:
        """Return the tokens of a row of JSON; raises RowError."""
        found = self._encode(parse_row(content))
        if len(found.trained):
            found.trained[0] = False  # nothing comes before it: no prediction is asked for it
        return found

    def _encode(self, row: Row) -> Encoded:
        settings, tokenizer = self._settings, self.tokenizer
        if isinstance(row, Ready):
            self._check_ids(row)
            labels = np.array(row.labels, dtype=np.int64)
            if settings.train_on is not None and not (
                settings.train_on == "all" and -100 not in labels
            ):
                raise RowError(
                    f"its labels say what is trained, and data.train_on is {settings.train_on}: "
                    "leave it out"
                )
            return Encoded(np.array(row.ids, dtype=np.uint32), labels != -100)
        if isinstance(row, Conversation):
            template = self._templates[row.tools is not None]
            if template is None:
                raise RowError(
                    f"{settings.tokenizer} has no chat template: set data.chat_template to a file "
                    "or to Jinja text"
                )
            asked = settings.train_on or ("completion" if row.is_completion else "assistant")
            text, spans = trained_turns(
                template,
                row,
                asked,
                last_only=settings.mask_history,
                special=tokenizer.special_texts,
            )
            return replace(tokenizer.encode(text, spans), altered=is_altered(row, text))
        if isinstance(row, Document):
            if settings.train_on not in (None, "all"):
                raise RowError(
                    f"it is text, of which nothing says what is trained, and data.train_on is "
                    f"{settings.train_on}: set it to all, or leave it out"
                )
            return self._closed(tokenizer.encode(row.text, [(0, len(row.text))]), "all")
        assert isinstance(row, Prompted)
        begin = 0 if settings.train_on == "all" else len(row.prompt)
        text = row.prompt + row.completion
        return self._closed(tokenizer.encode(text, [(begin, len(text))]), settings.train_on)

    def _closed(self, found: Encoded, asked: str | None) -> Encoded:
        """Return tokens after those that begin a text, and before the one that ends it."""
        begin, end = self.tokenizer.begin_ids, self.tokenizer.end_id
        if end is None:
            raise RowError(
                f"{self._settings.tokenizer} names no token that ends a text: set eos_token in its "
                "tokenizer_config.json"
            )
        ids = np.concatenate([begin, found.ids, [end]]).astype(np.uint32)
        trained = np.concatenate([np.full(len(begin), asked == "all"), found.trained, [True]])
        return Encoded(ids, trained.astype(np.bool_))

    def _check_ids(self, row: Ready) -> None:
        for place, number in enumerate(row.ids):
            if not 0 <= number < self.tokenizer.vocabulary:
                raise RowError(
                    f"its id {place} is {number}, and the tokenizer has "
                    f"{self.tokenizer.vocabulary:,}: they were made with another one"
                )

    def _template(self, tools: bool) -> ChatTemplate | None:
        source = read_template(self._settings.tokenizer, self._settings.template, tools=tools)
        if source is None:
            return None
        return ChatTemplate(source, self.tokenizer.special)
