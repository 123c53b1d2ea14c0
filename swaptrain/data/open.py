"""The config's `data` and `eval` sections become micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from swaptrain.data.batches import Batches
from swaptrain.data.conversations import Conversations
from swaptrain.data.masking import mask_tokens
from swaptrain.data.read_ahead import AheadSettings, BatchesAhead
from swaptrain.data.record import DataRecord, RunRecord
from swaptrain.data.settings import DataSettings, EvalSettings, SourceSettings
from swaptrain.data.sources import (
    FoundData,
    Source,
    find_text,
    find_tokens,
    first_unknown_id,
    fitting_tokenizer,
    largest_id,
    open_python,
    text_files,
    token_files,
)
from swaptrain.data.text import document_tokens, too_short
from swaptrain.data.tokens.token_files import Joined
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.store.paths import RunPaths
from swaptrain.units import MIB, format_size

__all__ = ["Opening", "conversations_of", "describe_rows", "find_data", "find_eval", "open_data"]
__all__ += ["open_eval", "open_example"]

Note = Callable[[str], None]

_MOST_LOOKED_AT_BYTES = 32 * MIB
"""Of files of rows, where nothing is to be written."""
_ID_BYTES = 8
"""Of a token id and of a label, int64."""


def _silent(_: str) -> None:
    """Say nothing."""


class Opening:
    """Data between the first look at it and the record that a run keeps of it."""

    def __init__(
        self,
        found: FoundData,
        run_record: RunRecord,
        batches: Callable[[Source], Batches],
        *,
        counts_items: bool,
    ) -> None:
        """`batches` makes micro-batches of what was found; `counts_items`: they are recorded."""
        self._found, self._run_record = found, run_record
        self._batches, self._counts_items = batches, counts_items
        self._items = 0

    @property
    def record(self) -> DataRecord:
        """What the data is; the number of its items is not known yet."""
        return self._found.record

    def open(self, *, like: Batches | None = None) -> Batches:
        """Return the micro-batches, for which text is tokenised; raises ConfigError.

        Held-out ones have to be `like` those of the training data.
        """
        batches = self._batches(self._found.open())
        if like is not None and batches.layout != like.layout:
            raise ConfigError(
                f"eval: its items have {batches.layout}, those of data have {like.layout}: the "
                "model takes one kind, make them the same"
            )
        self._items = len(batches) if self._counts_items else 0
        return batches

    def keep(self) -> None:
        """Record what was opened: a later start compares its data with it."""
        kept = self.record if self._counts_items else replace(self.record, sketches={})
        self._run_record.keep(replace(kept, items=self._items))


def find_data(
    config: DataSettings,
    *,
    seed: int,
    run_dir: Path,
    model_vocabulary: int | None,
    fresh: bool = False,
    note: Note = _silent,
) -> Opening:
    """Look at the training data, and write nothing yet; as `open_data` says."""
    run_record = RunRecord(RunPaths(run_dir).train_data, refuse=not fresh)
    found = _find(config, config, "data", run_record, model_vocabulary, note)

    def batches(source: Source) -> Batches:
        ahead = None
        if config.workers and config.python is not None:
            settings = AheadSettings(
                config.python,
                dict(config.kwargs),
                config.collate,
                "data.python",
                source.name,
                seed,
                config.shuffle,
                config.micro_batch,
                config.micro_batches,
            )
            ahead = BatchesAhead(settings, config.workers)
        count, shuffle = config.micro_batches, config.shuffle
        return _batches(source, config, count, seed=seed, shuffle=shuffle, ahead=ahead)

    return Opening(found, run_record, batches, counts_items=True)


def open_data(
    config: DataSettings,
    *,
    seed: int,
    run_dir: Path,
    model_vocabulary: int | None,
    fresh: bool = False,
    note: Note = _silent,
) -> Batches:
    """Open the training data, tokenising text into `run_dir/data` (or the cache) the first time.

    What the data is gets recorded in `run_dir/data/train.json`; a later start with other data is
    refused unless `fresh`. `model_vocabulary` None: not known, not checked. `note` hears of the
    long work. Raises ConfigError for every fault of the config or the data, before it has left
    anything in the run directory.
    """
    opening = find_data(
        config,
        seed=seed,
        run_dir=run_dir,
        model_vocabulary=model_vocabulary,
        fresh=fresh,
        note=note,
    )
    batches = opening.open()
    opening.keep()
    return batches


def find_eval(
    config: EvalSettings,
    data: DataSettings,
    *,
    run_dir: Path,
    model_vocabulary: int | None,
    note: Note = _silent,
    sketched: bool = False,
) -> Opening:
    """Look at the held-out data, and write nothing yet; as `open_eval` says.

    With `sketched` a few items of a dataset are read too, for ranks to compare.
    """
    run_record = RunRecord(RunPaths(run_dir).eval_data, refuse=False)
    found = _find(config, data, "eval", run_record, model_vocabulary, note, sketched=sketched)

    def batches(source: Source) -> Batches:
        there = -(-len(source.dataset) // data.micro_batch)
        count = there if config.batches == "all" else min(there, config.batches)
        return _batches(source, data, max(count, 1), seed=0, shuffle=False, once=True)

    return Opening(found, run_record, batches, counts_items=False)


def open_eval(
    config: EvalSettings,
    data: DataSettings,
    *,
    run_dir: Path,
    model_vocabulary: int | None,
    like: Batches | None = None,
    note: Note = _silent,
) -> Batches:
    """Open the held-out data: batch(1, i) for i in range(its micro_batches), in order.

    As many as `config.batches`, or as the data has: each item once, so that the last one may have
    fewer items.
    Tokenizer, sequence length, micro-batch and cache are those of `data`. Other data than at the
    last start is taken as it is. With `like`, the training data, ConfigError is raised too if the
    batches are not of its keys, shapes and dtypes.
    """
    opening = find_eval(config, data, run_dir=run_dir, model_vocabulary=model_vocabulary, note=note)
    batches = opening.open(like=like)
    opening.keep()
    return batches


def open_example(
    config: DataSettings,
    *,
    model_vocabulary: int | None,
    most_bytes: int | None = None,
    held_out: EvalSettings | None = None,
) -> dict[str, torch.Tensor]:
    """Return a micro-batch with the keys, shapes and dtypes of the data, and write nothing.

    For text and tokens its ids are the first ones of the data, repeated where they are too few.
    With `held_out` it is one of the `eval` section. Raises ConfigError as `open_data` and
    `open_eval` do for all that shows without reading the whole data, and BudgetError where the
    micro-batch takes more than `most_bytes`.
    """
    source: SourceSettings = config if held_out is None else held_out
    section = "data" if held_out is None else "eval"
    if source.python is not None:
        opened = open_python(source.python, source, section, config.collate, check=True)
        batches = _unread(opened, config, 1, seed=0, shuffle=False)
        _check_size(config, batches.item_bytes, most_bytes)
        return batches.example()
    length = config.sequence_length
    rows = conversations_of(source, config, section, model_vocabulary)
    if rows is not None:
        _check_size(config, 3 * length * _ID_BYTES, most_bytes)
        return rows.example(config.micro_batch)
    if config.mask is not None:  # refused here, before anything is written
        mask_tokens(fitting_tokenizer(config, model_vocabulary))
    _check_size(config, 2 * length * _ID_BYTES, most_bytes)
    shape = (config.micro_batch, length)
    if source.text is not None:
        key = f"{section}.text"
        tokenizer = fitting_tokenizer(config, model_vocabulary)
        files = text_files(source.text, config, tokenizer, key)
        few: list[int] = []
        for piece in document_tokens(files, tokenizer, key):
            few.extend(piece[: shape[0] * shape[1] - len(few)].tolist())
            if len(few) == shape[0] * shape[1]:
                break
        if len(few) < length:
            raise too_short(key, len(few), length)
        first = np.array(few, dtype=np.int64)
    else:
        key = f"{section}.tokens"
        files, sources = token_files(source, config, section, model_vocabulary)
        joined = Joined(sources)
        first = joined.read(0, min(shape[0] * shape[1], len(joined)))
        beyond = model_vocabulary is not None and first.max() >= model_vocabulary
        if beyond or first.min() < 0:  # before the model fails on it
            for file, its_ids in zip(files, sources, strict=True):
                largest = largest_id(f"{key}: {file.path}", its_ids)
                if model_vocabulary is not None and largest >= model_vocabulary:
                    raise first_unknown_id(f"{key}: {file.path}", its_ids, model_vocabulary)
    ids = torch.tensor(np.resize(first, shape))
    return {"input_ids": ids, "labels": ids.clone()}


def describe_rows(
    config: DataSettings, *, run_dir: Path, model_vocabulary: int | None
) -> str | None:
    """Say what the rows of the training data come to, and show one; None for data of other kinds.

    Where no start has read them, some tens of megabytes of them are read. Raises ConfigError.
    """
    rows = conversations_of(config, config, "data", model_vocabulary)
    if rows is None:
        return None
    record = RunRecord(RunPaths(run_dir).train_data, refuse=False)
    report, is_whole = rows.report(record, _MOST_LOOKED_AT_BYTES)
    text = report.line(config.sequence_length)
    if not is_whole:
        text = f"of the first rows, as far as they were looked at: {text}"
    return f"{text}\nthe first row, what is trained in [[ ]]:\n{rows.shown().strip()}"


def _find(
    source: SourceSettings,
    config: DataSettings,
    section: str,
    run_record: RunRecord,
    model_vocabulary: int | None,
    note: Note,
    *,
    sketched: bool = True,
) -> FoundData:
    """Look at whichever of the four kinds `source` names."""
    rows = conversations_of(source, config, section, model_vocabulary, note)
    if rows is not None:
        return rows.find(run_record)
    if source.text is not None:
        return find_text(source.text, config, section, run_record, model_vocabulary, note)
    if source.tokens is not None:
        return find_tokens(source, config, section, run_record, model_vocabulary, note)
    if source.python is not None:
        opened = open_python(source.python, source, section, config.collate, sketched=sketched)
        run_record.check(opened.record)
        return FoundData(opened.record, lambda: opened)
    raise ConfigError(f"{section}: it names no data: set one of text, chat, tokens and python")


def conversations_of(
    source: SourceSettings,
    config: DataSettings,
    section: str,
    model_vocabulary: int | None,
    note: Note = _silent,
) -> Conversations | None:
    """Return the rows that a section reads; None where it reads data of another kind.

    An `eval` section without data of its own reads what `data.held_out` leaves of the rows.
    """
    patterns = source.chat
    if patterns is None and all(n is None for n in (source.text, source.tokens, source.python)):
        patterns = config.chat
    if patterns is None:
        return None
    return Conversations(
        patterns,
        config,
        section,
        held_out=section == "eval" and source.chat is None,
        model_vocabulary=model_vocabulary,
        note=note,
    )


def _check_size(config: DataSettings, item_bytes: int, most_bytes: int | None) -> None:
    """Raise BudgetError for a micro-batch that is larger by itself than all that may be taken."""
    nbytes = config.micro_batch * item_bytes
    if most_bytes is not None and nbytes > most_bytes:
        raise BudgetError(
            f"data.micro_batch is {config.micro_batch:,}: its items alone take "
            f"{format_size(nbytes)}, and memory.host is {format_size(most_bytes)}: lower "
            "data.micro_batch, and raise data.micro_batches for as many items in a step",
            key="data.micro_batch",
        )


def _batches(
    source: Source,
    config: DataSettings,
    micro_batches: int,
    *,
    seed: int,
    shuffle: bool,
    once: bool = False,
    ahead: BatchesAhead | None = None,
) -> Batches:
    batches = _unread(
        source, config, micro_batches, seed=seed, shuffle=shuffle, once=once, ahead=ahead
    )
    batches.example()  # raises ConfigError where the first items do not fit together
    return batches


def _unread(
    source: Source,
    config: DataSettings,
    micro_batches: int,
    *,
    seed: int,
    shuffle: bool,
    once: bool = False,
    ahead: BatchesAhead | None = None,
) -> Batches:
    return Batches(
        source.dataset,
        name=source.name,
        digest=source.record.digest,
        seed=seed,
        shuffle=shuffle,
        micro_batch=config.micro_batch,
        micro_batches=micro_batches,
        expect=source.expect,
        draws=source.draws,
        once=once,
        collate=source.collate,
        ahead=ahead,
    )
