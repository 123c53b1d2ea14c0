"""The three kinds of data a config can name: text, token files, a Python dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from swaptrain.data.batches import Batches, Dataset
from swaptrain.data.corpus import CorpusFile, corpus_digest, find_files, hash_files
from swaptrain.data.documents import NotTextError, check_name
from swaptrain.data.masking import MaskedTokens, mask_tokens
from swaptrain.data.python_dataset import load_collate, load_dataset
from swaptrain.data.record import DataRecord, RunRecord
from swaptrain.data.seeded import CONSTRUCTION_SEED, check_repeatable, seeded
from swaptrain.data.settings import DataSettings, SourceSettings
from swaptrain.data.sketches import sketches
from swaptrain.data.text import tokenised, too_short
from swaptrain.data.tokenizer import Tokenizer, open_tokenizer
from swaptrain.data.tokens.packed import PackedTokens
from swaptrain.data.tokens.token_files import FlatFile, Joined, TokenSource, open_token_file, scan
from swaptrain.errors import ConfigError
from swaptrain.units import format_size, how_many

__all__ = [
    "FoundData",
    "Source",
    "find_text",
    "find_tokens",
    "first_unknown_id",
    "fitting_tokenizer",
    "largest_id",
    "open_python",
    "text_files",
    "token_files",
]

_LONG_READ_BYTES = 2**30


@dataclass(frozen=True)
class Source:
    """A dataset, what messages call it, and what it was made of."""

    dataset: Dataset
    name: str
    record: DataRecord
    expect: Callable[[int], None] | None = None
    """Begins to read an item that will be asked for, where the dataset can do that."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a micro-batch of items; None: they are stacked."""
    draws: bool = False
    """Whether reading an item may draw random numbers."""


@dataclass(frozen=True)
class FoundData:
    """Data that was looked at, of which nothing is written yet."""

    record: DataRecord
    open: Callable[[], Source]
    """Writes what is needed of it, such as tokens, and opens it; raises ConfigError."""


def open_python(
    target: str,
    settings: SourceSettings,
    section: str,
    collate: str | None,
    *,
    check: bool = False,
    sketched: bool = False,
) -> Source:
    """Load the dataset of `package.module:function`; raises ConfigError.

    With `check` a few items are read twice, to see that they are the same each time. With
    `sketched` its record has the content of a few, which a run compares when it goes on.
    """
    key = f"{section}.python"
    with seeded(CONSTRUCTION_SEED):
        dataset = load_dataset(target, settings.kwargs, key=key)
    name = f"{key} ({target})"
    function = load_collate(collate)
    probe = Batches(
        dataset,
        name=name,
        digest="",
        seed=0,
        shuffle=False,
        micro_batch=1,
        micro_batches=1,
        draws=True,
        collate=function,
    )
    if check:
        probe.check_layouts()
        check_repeatable(dataset, probe.item, len(probe), name)
    # What goes on for as long as a run does is another length with each number of steps.
    length = 0 if getattr(dataset, "is_endless", False) else len(probe)
    identity = [target, dict(settings.kwargs), length, probe.layout]
    if collate is not None:
        identity.append(collate)
    digest = xxhash.xxh3_128(json.dumps(identity, default=str).encode()).hexdigest()
    # And its numbers are other items with each number of steps, but for the first.
    content = sketches(probe.item, length or 1) if sketched else {}
    record = DataRecord(digest, sketches=content)
    return Source(dataset, name, record, draws=True, collate=function)


def find_text(
    patterns: Sequence[str],
    config: DataSettings,
    section: str,
    run_record: RunRecord,
    model_vocabulary: int | None,
    note: Callable[[str], None],
) -> FoundData:
    """Look at a corpus, which is tokenised when it is opened; raises ConfigError.

    Files whose size and time are recorded are not read again, nor is what an earlier start has
    tokenised.
    """
    key = f"{section}.text"
    length = config.sequence_length
    tokenizer = fitting_tokenizer(config, model_vocabulary)
    found = text_files(patterns, config, tokenizer, key, note)
    new_bytes = sum(file.size_bytes for file in found if file.path not in run_record.known)
    if new_bytes > _LONG_READ_BYTES:
        note(f"reading {format_size(new_bytes)} of text once, for its digest")
    forgotten = tokenizer.name == "bytes" and (model_vocabulary or 0) > 2 * tokenizer.vocabulary
    if section == "data" and new_bytes and forgotten:
        note(
            f"data.tokenizer is bytes, of which there are {tokenizer.vocabulary}: most of the "
            f"{model_vocabulary:,} words of the model never occur"
        )
    files = hash_files(found, run_record.known, key=key)
    record = DataRecord(corpus_digest(files, tokenizer.digest), tokenizer.digest, tuple(files))
    run_record.check(record)
    root = run_record.path.parent if config.cache is None else Path(config.cache)

    def opened() -> Source:
        tokens = tokenised(
            root, record.digest, files, tokenizer, at_least=length, key=key, note=note
        )
        return _packed(tokens, config, tokenizer, key, record)

    return FoundData(record, opened)


def find_tokens(
    source: SourceSettings,
    config: DataSettings,
    section: str,
    run_record: RunRecord,
    model_vocabulary: int | None,
    note: Callable[[str], None],
) -> FoundData:
    """Look at files of ids, all of them the first time; raises ConfigError."""
    key = f"{section}.tokens"
    found, opened = token_files(source, config, section, model_vocabulary, note)
    joined = Joined(opened)
    forms = _forms(opened)
    known = run_record.known if run_record.tokenizer_digest == forms else {}
    if any(file.path not in known for file in found):
        note(f"reading {how_many(len(joined), 'token')} once, to check them")
    files = hash_files(found, known, key=key)
    files = [_with_largest_id(f, ids, key) for f, ids in zip(files, opened, strict=True)]
    for file, ids in zip(files, opened, strict=True):
        if model_vocabulary is not None and file.largest_id >= model_vocabulary:
            raise first_unknown_id(f"{key}: {file.path}", ids, model_vocabulary)
    record = DataRecord(corpus_digest(files, forms), forms, files=tuple(files))
    run_record.check(record)
    tokenizer = None if config.mask is None else fitting_tokenizer(config, model_vocabulary)
    return FoundData(record, lambda: _packed(joined, config, tokenizer, key, record))


def _packed(
    tokens: TokenSource,
    config: DataSettings,
    tokenizer: Tokenizer | None,
    key: str,
    record: DataRecord,
) -> Source:
    """Return tokens as sequences of one length, of which a part may be masked."""
    packed = PackedTokens(tokens, config.sequence_length)
    if config.mask is None or tokenizer is None:
        return Source(packed, key, record, packed.expect)
    items = MaskedTokens(packed, config.mask, mask_tokens(tokenizer))
    return Source(items, key, record, packed.expect, draws=True)


def _forms(opened: Sequence[TokenSource]) -> str:
    """Return how the ids of raw files are stored; empty where all are of uint16."""
    forms = [ids.form if isinstance(ids, FlatFile) else "" for ids in opened]
    return ", ".join(forms) if any(forms) else ""


def largest_id(where: str, ids: TokenSource) -> int:
    """Return the largest id of a file; raises ConfigError with the place of a negative one."""
    largest, place = -1, 0
    for piece in scan(ids):
        if piece.min() < 0:
            first = int(np.flatnonzero(piece < 0)[0])
            raise ConfigError(
                f"{where} has the id {piece[first]} as its token {place + first:,}: ids are 0 or "
                "more, and less than 2^63"
            )
        largest = max(largest, int(piece.max()))
        place += len(piece)
    return largest


def first_unknown_id(where: str, ids: TokenSource, model_vocabulary: int) -> ConfigError:
    """Return the refusal of a file of ids, with the place of the first that the model has not."""
    place = 0
    for piece in scan(ids):
        beyond = np.flatnonzero(piece >= model_vocabulary)
        if beyond.size:
            hint = ids.hint(model_vocabulary) if isinstance(ids, FlatFile) else ""
            place += int(beyond[0])
            return unknown_id(where, int(piece[beyond[0]]), model_vocabulary, place, hint)
        place += len(piece)
    raise AssertionError("a file without such an id is not refused")


def unknown_id(where: str, found: int, model_vocabulary: int, place: int, hint: str) -> ConfigError:
    """Return the refusal of data whose token `place` (from 0) the model does not have."""
    return ConfigError(
        f"{where} has the id {found}, its token {place:,}, the model's vocabulary has "
        f"{model_vocabulary} (0 to {model_vocabulary - 1}){hint}: take the tokenizer of "
        "this model, or a model with a larger vocabulary"
    )


def fitting_tokenizer(config: DataSettings, model_vocabulary: int | None) -> Tokenizer:
    """Return the tokenizer; raises ConfigError if it has ids that the model does not."""
    tokenizer = open_tokenizer(
        config.tokenizer, parse_special=config.parse_special, as_is=config.text_as_is
    )
    if model_vocabulary is not None and tokenizer.vocabulary > model_vocabulary:
        raise ConfigError(
            f"data.tokenizer: {tokenizer.name} has {tokenizer.vocabulary} ids, the model's"
            f" vocabulary has {model_vocabulary}: set model.resize_to_tokenizer, the model's"
            f" vocab_size to {tokenizer.vocabulary} or more, or take its own tokenizer"
        )
    return tokenizer


def text_files(
    patterns: Sequence[str],
    config: DataSettings,
    tokenizer: Tokenizer,
    key: str,
    note: Callable[[str], None] = lambda _: None,
) -> list[CorpusFile]:
    """Return the corpus' files; raises ConfigError where their names or sizes say that it is none.

    That is where one is no text by its name, and where all are too short together.
    """
    files = find_files(patterns, key=key, note=note)
    sequence_length = config.sequence_length
    for file in () if config.text_as_is else files:
        try:
            check_name(file.path)
        except NotTextError as error:
            raise ConfigError(f"{key}: {file.path} {error}") from error
    size_bytes = sum(file.size_bytes for file in files)
    if size_bytes == 0:
        raise ConfigError(f"{key}: the corpus is empty: no bytes in {how_many(len(files), 'file')}")
    # For bytes the number of tokens is known; other tokenizers are counted when they have run.
    if tokenizer.name == "bytes" and size_bytes + len(files) < sequence_length:
        raise too_short(key, size_bytes + len(files), sequence_length)
    return files


def token_files(
    source: SourceSettings,
    config: DataSettings,
    section: str,
    model_vocabulary: int | None,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[list[CorpusFile], list[TokenSource]]:
    """Open the files of ids in the given order; raises ConfigError if they hold too few."""
    key, needed = f"{section}.tokens", config.sequence_length
    files = find_files(source.tokens or (), key=key, directories=True, note=note)
    dtype = source.token_dtype or config.token_dtype
    opened = [
        open_token_file(file.path, key=key, token_dtype=dtype, vocabulary=model_vocabulary)
        for file in files
    ]
    for file, ids in zip(files, opened, strict=True):
        if not len(ids):
            raise ConfigError(f"{key}: {file.path} holds no tokens: take it out of the list")
    tokens = sum(map(len, opened))
    if tokens < needed:
        raise too_short(key, tokens, needed)
    return files, opened


def _with_largest_id(file: CorpusFile, ids: TokenSource, key: str) -> CorpusFile:
    if file.largest_id >= 0:
        return file
    return replace(file, largest_id=largest_id(f"{key}: {file.path}", ids))
