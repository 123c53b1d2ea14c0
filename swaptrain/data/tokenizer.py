"""Text becomes token ids: bytes, or a local Hugging Face tokenizer. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from swaptrain.errors import ConfigError

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "open_tokenizer"]

_PIECE_BYTES = 2**20
# Those of a tokenizer's files that decide its ids; the others (chat templates) do not.
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(Protocol):
    """Turns a document into ids and names the id that ends it."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest id."""

    @property
    def end_token(self) -> int:
        """The id that follows each document."""

    @property
    def digest(self) -> str:
        """Names the mapping: equal digests, equal ids."""

    def pieces(self, path: Path) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the ids of one document in pieces, without its end token; raises OSError."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of a file, 256 ends it; reads files of any size in pieces."""

    name = "bytes"
    vocabulary = 257
    end_token = 256
    digest = "bytes"

    def pieces(self, path: Path) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the file's bytes as uint8 arrays of at most 1 MiB."""
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield np.frombuffer(piece, dtype=np.uint8)


class HuggingFaceTokenizer:
    """A directory with tokenizer.json, as `save_pretrained` writes it; one document at a time.

    No special tokens are added but the end token, which is the directory's `eos_token`. Truncation
    and padding that the file asks for are switched off: they would lose or invent text.
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = str(directory)
        if not directory.is_dir():
            raise ConfigError(
                f"data.tokenizer: there is no directory {directory}: give `bytes`, or a local"
                " directory with a tokenizer.json"
            )
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"data.tokenizer: {directory} has no tokenizer.json: write one with"
                " transformers.AutoTokenizer.from_pretrained(...).save_pretrained(directory)"
            )
        try:
            self._backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"data.tokenizer: {file} is not usable: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        if not ids:
            raise ConfigError(f"data.tokenizer: {file} has an empty vocabulary")
        self.vocabulary = max(ids.values()) + 1
        end = _end_token(directory)
        if end not in ids:
            missing = "eos_token is missing" if end is None else f"{end!r} is not in the vocabulary"
            raise ConfigError(
                f"data.tokenizer: {directory} names no usable end token ({missing}): set eos_token"
                " in its tokenizer_config.json, it separates the documents"
            )
        self.end_token = ids[end]
        hashed = xxhash.xxh3_128()
        for name in _FILES:
            if (directory / name).is_file():
                hashed.update(name.encode() + (directory / name).read_bytes())
        self.digest: str = hashed.hexdigest()

    def pieces(self, path: Path) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the ids of one document as one uint32 array; it is held in memory as a whole."""
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"data.text: {path} is not UTF-8 (byte {error.start}): convert it, leave it out,"
                " or use data.tokenizer: bytes"
            ) from error
        yield np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


def open_tokenizer(name: str | Path) -> Tokenizer:
    """Return the tokenizer called `bytes`, or that of a local directory; raises ConfigError."""
    return ByteTokenizer() if str(name) == "bytes" else HuggingFaceTokenizer(Path(name))


def _end_token(directory: Path) -> str | None:
    """Return the end token that the directory's files name, the later format first."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            entry = json.loads(path.read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"data.tokenizer: {path} is not a JSON object: {error}") from error
        token = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(token, str):
            return token
    return None
