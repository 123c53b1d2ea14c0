"""Files of conversations and other rows become sequences: opened, counted, shown."""

# T sequence length

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from swaptrain.chat import EncodeSettings, Packer, Report, coded, decoded, encode_files
from swaptrain.chat.tokens import ChatTokenizer, Encoded
from swaptrain.data.corpus import CorpusFile, corpus_digest, find_files, hash_files
from swaptrain.data.record import DataRecord, RunRecord
from swaptrain.data.row_sequences import RowSequences
from swaptrain.data.settings import DataSettings
from swaptrain.data.sources import FoundData, Source
from swaptrain.data.text import check_unchanged
from swaptrain.data.tokens.token_array import Array, write_token_array
from swaptrain.data.tokens.token_cache import Built, built_once, find_built
from swaptrain.errors import ConfigError
from swaptrain.units import format_size, how_many

__all__ = ["Conversations"]

_PACKING = "sequences 1"
"""Goes up with every change of how rows are laid into sequences."""
_SHOWN_TOKENS = 120
_SAID_EVERY_S = 30.0


class Conversations:
    """The rows that `patterns` name, as the config's `data` section has them read.

    `held_out`: of a split by `data.held_out`, the part for evaluation. Raises ConfigError for a
    tokenizer that is missing or does not fit the model, and for files that are not there.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        config: DataSettings,
        section: str,
        *,
        held_out: bool,
        model_vocabulary: int | None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.key = f"{section}.chat"
        self._config, self._note = config, note
        self._length = config.sequence_length
        directory = Path(config.tokenizer)
        if str(config.tokenizer) == "bytes" or not (directory / "tokenizer.json").is_file():
            raise ConfigError(
                f"{self.key} needs data.tokenizer: a directory with a tokenizer.json, such as that "
                f"of the model (found {config.tokenizer})"
            )
        self._tokenizer = ChatTokenizer(directory)
        if model_vocabulary is not None and self._tokenizer.vocabulary > model_vocabulary:
            raise ConfigError(
                f"data.tokenizer: {directory} has {self._tokenizer.vocabulary:,} ids, the model's "
                f"vocabulary has {model_vocabulary:,}: take the model's own tokenizer, or set "
                "model.resize_to_tokenizer"
            )
        self._settings = EncodeSettings(
            directory,
            config.chat_template,
            config.train_on,
            config.mask_history,
            config.held_out or 0.0,
            held_out,
        )
        self._digest = xxhash.xxh3_128(
            f"{self._settings.digest()} {_PACKING} {self._length} {bool(config.packing)}".encode()
        ).hexdigest()
        self._files = find_files(patterns, key=self.key, directories=True, note=note)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self._files)

    def find(self, run_record: RunRecord) -> FoundData:
        """Look at the rows, which become sequences when they are opened; raises ConfigError."""
        files = self._hashed(run_record)
        record = DataRecord(corpus_digest(files, self._digest), self._digest, tuple(files))
        run_record.check(record)
        root = self._root(run_record)
        return FoundData(record, lambda: self._open(root, record))

    def _open(self, root: Path, record: DataRecord) -> Source:
        """Return the sequences, made where an earlier start has not; raises ConfigError."""
        files = record.files

        def build(path: Path) -> tuple[int, Mapping[str, Any]]:
            named = files[0].path if len(files) == 1 else how_many(len(files), "file")
            self._note(f"encoding {named}, {format_size(self.size_bytes)}")
            report = Report()
            sequences = self._told(self._sequences(report), report)
            length = write_token_array(path, sequences, self._values)
            if not length:
                raise self._nothing(report)
            check_unchanged(files, self.key)
            return length, {"report": report.fields()}

        built = built_once(root, record.digest, self._values, build)
        self._note(f"{self.key}: {_report(built).line(self._length)}")
        if self.key == "data.chat":
            self._note(f"its first row, what is trained in [[ ]]:\n{self.shown().strip()}")
        packed = RowSequences(built.tokens, self._length, several=bool(self._config.packing))
        return Source(packed, self.key, record, packed.expect)

    def example(self, items: int) -> dict[str, torch.Tensor]:
        """Return a micro-batch of the first rows, each [items, T]; nothing is written."""
        report = Report()
        packer = Packer(self._length, self._tokenizer.pad_id, report, several=False)
        rows = (s for row in self._rows(1) for s in packer.add(row))
        found = list(islice(rows, items))
        if not found:
            raise self._nothing(report)
        values = np.stack([found[i % len(found)] for i in range(items)]).astype(np.int64)
        each = [decoded(row) for row in values]
        names = ("input_ids", "labels", "position_ids")[: 3 if self._config.packing else 2]
        stacked = [torch.from_numpy(np.stack(arrays)) for arrays in zip(*each, strict=True)]
        return dict(zip(names, stacked, strict=False))

    def count(self, run_record: RunRecord, most: int | None) -> int:
        """Return how many sequences there are, or a number that is not below `most`."""
        if run_record.is_there or self._config.cache is not None:
            digest = corpus_digest(self._hashed(run_record), self._digest)
            found = find_built(self._root(run_record), digest, self._values)
            if found is not None:
                return len(found.tokens) // self._length
        report = Report()
        items = sum(1 for _ in islice(self._sequences(report), most))
        if not items:
            raise self._nothing(report)
        return items

    def shown(self) -> str:
        """Return the first row as the model sees it, what is trained of it in [[ ]]."""
        for row in self._rows(1):
            if row.trained.any():
                return _shown(row, self._tokenizer)
        return "none"

    def report(self, run_record: RunRecord, most_bytes: int) -> tuple[Report, bool]:
        """Return what the rows come to, and whether that is of all of them.

        Where no start has made the sequences, files are read up to `most_bytes` of them.
        """
        if run_record.is_there:
            digest = corpus_digest(self._hashed(run_record), self._digest)
            found = find_built(self._root(run_record), digest, self._values)
            if found is not None:
                return _report(found), True
        report = Report()
        few: list[CorpusFile] = []
        for file in self._files:
            if few and sum(f.size_bytes for f in few) + file.size_bytes > most_bytes:
                break
            few.append(file)
        most_tokens = max(most_bytes // 4, self._length)
        for _ in self._sequences(report, few):
            if report.tokens >= most_tokens:
                return report, False
        return report, len(few) == len(self._files)

    @property
    def _values(self) -> int:
        """One more than the largest number that a place of a sequence is stored as."""
        largest = np.array([self._tokenizer.vocabulary - 1], dtype=np.uint32)
        return int(coded(largest, np.ones(1, dtype=np.bool_))[0]) + 1

    def _hashed(self, run_record: RunRecord) -> list[CorpusFile]:
        return hash_files(self._files, run_record.known, key=self.key)

    def _root(self, run_record: RunRecord) -> Path:
        cache = self._config.cache
        return run_record.path.parent if cache is None else Path(cache)

    def _rows(
        self, processes: int | None = None, files: Sequence[CorpusFile] | None = None
    ) -> Iterator[Encoded]:
        paths = [file.path for file in (self._files if files is None else files)]
        count = processes or len(os.sched_getaffinity(0))
        return encode_files(paths, self._settings, key=self.key, processes=count)

    def _sequences(
        self, report: Report, files: Sequence[CorpusFile] | None = None
    ) -> Iterator[Array]:
        several = bool(self._config.packing)
        packer = Packer(self._length, self._tokenizer.pad_id, report, several=several)
        for row in self._rows(files=files):
            yield from packer.add(row)
        yield from packer.finish()

    def _told(self, sequences: Iterator[Array], report: Report) -> Iterator[Array]:
        """Pass sequences on, and say from time to time how far it is."""
        begun = said = time.monotonic()
        for sequence in sequences:
            yield sequence
            now = time.monotonic()
            if now - said > _SAID_EVERY_S:
                said = now
                per_s = report.tokens / (now - begun)
                self._note(f"{how_many(report.rows, 'row')} so far, {per_s:,.0f} tokens a second")

    def _nothing(self, report: Report) -> ConfigError:
        if report.dropped:
            return ConfigError(
                f"{self.key}: nothing is trained in any row of {report.dropped:,}: none has a "
                f"turn of the assistant within its first {how_many(self._length, 'token')}; raise "
                "data.sequence_length, or set data.train_on to all"
            )
        return ConfigError(f"{self.key}: its files hold no rows: give it data to train on")


def _shown(row: Encoded, tokenizer: ChatTokenizer) -> str:
    """Return the beginning of a row as text, its trained tokens in [[ ]]."""
    few = zip(row.ids[:_SHOWN_TOKENS].tolist(), row.trained.tolist(), strict=False)
    text = ""
    for trained, tokens in groupby(few, key=lambda token: token[1]):
        piece = tokenizer.decode([number for number, _ in tokens])
        text += f"[[{piece}]]" if trained else piece
    return text + " ..." * (len(row.ids) > _SHOWN_TOKENS)


def _report(built: Built) -> Report:
    try:
        return Report.of(built.facts["report"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the record of the sequences is damaged ({error}): delete it") from error
