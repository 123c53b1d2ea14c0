"""Text becomes token ids: bytes, or a local Hugging Face tokenizer. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from swaptrain.chat.tokens import special_tokens
from swaptrain.data.documents import NotTextError, read_document
from swaptrain.data.tokens.special_tokens import hidden, special_names, unknown_token
from swaptrain.data.tokens.token_array import Array
from swaptrain.errors import ConfigError

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "open_tokenizer"]

_MOST_CHARACTERS = 2**22
"""Of documents that are encoded together; a longer one is alone."""
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

    def documents(self, paths: Iterable[Path]) -> Iterator[Iterable[Array]]:
        """Yield, for each document in order, its ids in pieces, without its end token.

        Where a document is asked for: raises OSError, and NotTextError for what is no text.
        """


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of a file, 256 ends it; reads files of any size in pieces."""

    name = "bytes"
    vocabulary = 257
    end_token = 256

    def __init__(self, *, as_is: bool = False) -> None:
        """Take text of any encoding; with `as_is` whatever is in a file."""
        self._as_is = as_is
        self.digest = "bytes as they are" if as_is else "bytes of text"

    def documents(self, paths: Iterable[Path]) -> Iterator[Iterable[Array]]:
        """Yield the bytes of each file as uint8 arrays of at most 1 MiB."""
        for path in paths:
            yield self._pieces(path)

    def _pieces(self, path: Path) -> Iterator[Array]:
        for piece in read_document(path, as_is=self._as_is):
            yield np.frombuffer(piece, dtype=np.uint8)


class HuggingFaceTokenizer:
    """A directory with tokenizer.json, as `save_pretrained` writes it.

    Documents of a few MiB together are encoded at a time, by as many threads as there are cores.

    No special tokens are added but the end token, the directory's `eos_token`, or its `sep_token`.
    Those that stand in a document are text, or with `parse_special` the tokens. Truncation and
    padding that the file asks for are switched off: they would lose or invent text.
    """

    def __init__(
        self, directory: Path, *, parse_special: bool = False, as_is: bool = False
    ) -> None:
        self.name, self._as_is = str(directory), as_is
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
        backend = _backend(file, file.read_text(encoding="utf-8", errors="replace"))
        ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
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
        self._backend, self._never = backend, np.array([], dtype=np.int64)
        if not parse_special:
            self._backend, self._never = _plain_text(file, directory, end, ids)
        hashed = xxhash.xxh3_128(f"special {parse_special}, as it is {as_is}".encode())
        for name in _FILES:
            if (directory / name).is_file():
                hashed.update(name.encode() + (directory / name).read_bytes())
        self.digest: str = hashed.hexdigest()

    def documents(self, paths: Iterable[Path]) -> Iterator[Iterable[Array]]:
        """Yield the ids of each document as one uint32 array; it is held in memory as a whole."""
        texts: list[str] = []
        characters = 0
        for path in paths:
            try:
                texts.append(self._text(path))
            except (OSError, NotTextError):
                yield from self._encoded(texts)  # those before it are whole
                raise
            characters += len(texts[-1])
            if characters >= _MOST_CHARACTERS:
                yield from self._encoded(texts)
                texts, characters = [], 0
        yield from self._encoded(texts)

    def _text(self, path: Path) -> str:
        content = b"".join(read_document(path, as_is=self._as_is))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            dropped = path.stat().st_size - len(content)
            raise NotTextError(
                f"is not UTF-8 (byte {error.start + dropped}): convert it, leave it out, or use "
                "data.tokenizer: bytes"
            ) from error

    def _encoded(self, texts: Sequence[str]) -> Iterator[Iterable[Array]]:
        # Without the places of tokens in the text, which take as long again.
        for found in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield self._checked(np.array(found.ids, dtype=np.uint32))

    def _checked(self, ids: Array) -> Iterator[Array]:
        found = np.flatnonzero(np.isin(ids, self._never))
        if found.size:
            raise NotTextError(
                f"gives the special token {int(ids[found[0]])} as its token {int(found[0])}, though"
                " it is to be read as text: set data.parse_special: true, or take that out of it"
            )
        yield ids


def open_tokenizer(
    name: str | Path, *, parse_special: bool = False, as_is: bool = False
) -> Tokenizer:
    """Return the tokenizer called `bytes`, or that of a local directory; raises ConfigError."""
    if str(name) == "bytes":
        return ByteTokenizer(as_is=as_is)
    return HuggingFaceTokenizer(Path(name), parse_special=parse_special, as_is=as_is)


def _backend(file: Path, text: str) -> Any:
    """Return the library's tokenizer; raises ConfigError."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer: {file} is not usable: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _plain_text(
    file: Path, directory: Path, end: str, ids: dict[str, int]
) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return a tokenizer that reads special tokens as text, and the ids that it never gives."""
    tree = json.loads(file.read_bytes())
    configs = [_read(directory / name) for name in _FILES[1:] if (directory / name).is_file()]
    names = ((special_names(tree, configs) | {end}) & ids.keys()) - _ordinary(tree, ids, end)
    changed, renamed = hidden(tree, names)
    backend = _backend(file, json.dumps(changed))
    backend.encode_special_tokens = True
    expected = {renamed.get(name, name): number for name, number in ids.items()}
    if backend.get_vocab(with_added_tokens=True) != expected or any(len(n) == 1 for n in names):
        raise ConfigError(
            f"data.tokenizer: {file} has special tokens that cannot be told from text: set "
            "data.parse_special: true, which reads them as tokens wherever they stand"
        )
    never = [ids[name] for name in names if name != unknown_token(tree)]
    return backend, np.array(never, dtype=np.int64)


def _ordinary(tree: dict[str, Any], ids: dict[str, int], end: str) -> set[str]:
    """Return words and signs that a config takes for padding or the like, such as `!`.

    Only a tokenizer.json that adds them as tokens makes them more than words.
    """
    added = {token["content"] for token in tree.get("added_tokens") or ()} | {end}
    return {word for word in ids if word not in added and (len(word) == 1 or word.isalpha())}


def _end_token(directory: Path) -> str | None:
    """Return the end token that the directory's files name, `sep_token` where there is no other."""
    special = special_tokens(directory)
    return special.get("eos_token") or special.get("sep_token")


def _read(path: Path) -> dict[str, Any]:
    """Return one of a tokenizer's smaller files; raises ConfigError."""
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it is {type(found).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"data.tokenizer: {path} is not a JSON object: {error}") from error
    return found
