"""Text becomes token ids, and characters that are trained become tokens that are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swaptrain.chat.refusal import RowError
from swaptrain.chat.template import Characters
from swaptrain.errors import ConfigError
from swaptrain.strict_json import read_json
from swaptrain.units import MIB

__all__ = ["ChatTokenizer", "Encoded", "open_backend", "special_tokens"]

_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
_MOST_BYTES = 16 * MIB


@dataclass(frozen=True)
class Encoded:
    """A row: its ids, uint32 [tokens], and whether each is trained, bool [tokens]."""

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]
    altered: bool = False
    """Whether the template left a message out, or wrote it otherwise."""


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer's files name, such as `eos_token`.

    Raises ConfigError.
    """
    found: dict[str, str] = {}
    for name in _CONFIGS:
        file = directory / name
        if not file.is_file():
            continue
        try:
            entries = read_json(file, _MOST_BYTES).items()
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"data.tokenizer: {file} is not a JSON object: {error}") from error
        for key, value in entries:
            text = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def open_backend(directory: Path) -> Any:
    """Return what a directory's tokenizer.json says, without truncation and padding.

    Raises ConfigError, naming `data.tokenizer`.
    """
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    try:
        backend: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer: {file} is not usable: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


class ChatTokenizer:
    """A directory's tokenizer.json; special tokens that stand in a text are those tokens."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError, naming `data.tokenizer`."""
        backend = open_backend(directory)
        self.special = special_tokens(directory)
        end = self.special.get("eos_token") or self.special.get("sep_token")
        self.end_id: int | None = None if end is None else backend.token_to_id(end)
        begin = self.special.get("bos_token") or self.special.get("cls_token")
        added = backend.encode("", add_special_tokens=True).ids
        begin_id = None if begin is None else backend.token_to_id(begin)
        self.begin_ids = [begin_id] if begin_id is not None and added[:1] == [begin_id] else []
        """What the tokenizer puts before a text of its own accord."""
        pad = self.special.get("pad_token")
        pad_id = None if pad is None else backend.token_to_id(pad)
        self.pad_id: int = next(i for i in (pad_id, self.end_id, 0) if i is not None)
        added_tokens = backend.get_added_tokens_decoder()
        self.special_ids = sorted(i for i, token in added_tokens.items() if token.special)
        self.special_texts = [added_tokens[i].content for i in self.special_ids]
        self.vocabulary = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        backend.post_processor = _nothing()  # it would trim what a token stands for
        self._backend = backend

    def encode(self, text: str, spans: Sequence[Characters]) -> Encoded:
        """Return the tokens of a text, trained where they lie in one of the spans.

        A token that reaches beyond a span is trained where only white space lies beyond. Raises
        RowError where anything else does, and for text that is no Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start : error.end]
            raise RowError(f"it holds {half!r}, half of a pair, which is no character") from error
        found = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(found.ids, dtype=np.uint32)
        trained = np.zeros(len(ids), dtype=np.bool_)
        if len(ids) == 0 or not spans:
            return Encoded(ids, trained)
        offsets = np.array(found.offsets, dtype=np.int64)  # [tokens, 2]
        begins, ends = offsets[:, 0], offsets[:, 1]
        for begin, end in spans:
            inside = (begins < end) & (ends > begin)
            inside |= (begins == ends) & (begins >= begin) & (begins < end)  # of no characters
            for place in np.flatnonzero(inside & ((begins < begin) | (ends > end))):
                outside = text[begins[place] : begin] + text[end : ends[place]]
                if outside.strip():
                    piece = text[begins[place] : ends[place]]
                    raise RowError(
                        f"its token {piece!r} is partly of a turn and partly not: the template and "
                        "the tokenizer do not fit together"
                    )
            trained |= inside
        return Encoded(ids, trained)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


def _nothing() -> Any:
    from tokenizers.processors import Sequence as Processors

    return Processors([])
