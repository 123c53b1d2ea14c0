"""Held-out data: how many items there are, and the batches in which each is counted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from swaptrain.data.corpus import corpus_digest, hash_files
from swaptrain.data.open import conversations_of, open_example
from swaptrain.data.record import RunRecord
from swaptrain.data.settings import DataSettings, EvalSettings
from swaptrain.data.sources import fitting_tokenizer, open_python, text_files, token_files
from swaptrain.data.text import document_tokens, tokens_on_disk, too_short
from swaptrain.data.tokens.token_files import Joined
from swaptrain.store.paths import RunPaths

__all__ = ["HeldOut", "look_at_held_out"]


@dataclass(frozen=True)
class HeldOut:
    """What a start knows of the held-out data before it opens it."""

    example: Mapping[str, torch.Tensor]
    """A micro-batch of its keys, shapes and dtypes."""
    items: int
    """How many items an evaluation takes, each once, from the start of the data."""

    def sizes(self, micro_batch: int) -> list[tuple[int, int]]:
        """Return the sizes of its batches, and how many there are of each: the smaller one last."""
        whole, rest = divmod(self.items, micro_batch)
        return [(size, n) for size, n in ((micro_batch, whole), (rest, 1)) if size and n]


def look_at_held_out(
    config: EvalSettings,
    data: DataSettings,
    *,
    run_dir: Path,
    model_vocabulary: int | None,
    most_bytes: int | None = None,
) -> HeldOut:
    """Return a micro-batch of the held-out data and the number of items; write nothing.

    Text is tokenised for the count, as far as an evaluation reads it, unless an earlier start has
    left its tokens. Raises ConfigError and BudgetError as `open_example` does.
    """
    example = open_example(
        data, model_vocabulary=model_vocabulary, most_bytes=most_bytes, held_out=config
    )
    most = None if config.batches == "all" else int(config.batches) * data.micro_batch
    length = data.sequence_length
    rows = conversations_of(config, data, "eval", model_vocabulary)
    if rows is not None:
        items = rows.count(RunRecord(RunPaths(run_dir).eval_data, refuse=False), most)
    elif config.python is not None:
        items = len(open_python(config.python, config, "eval", data.collate).dataset)
    elif config.text is not None:
        most_tokens = None if most is None else most * length
        items = _tokens_of_text(config, data, run_dir, model_vocabulary, most_tokens) // length
        if not items:
            raise too_short("eval.text", items, length)
    else:
        _, held = token_files(config, data, "eval", model_vocabulary)
        items = len(Joined(held)) // length
    return HeldOut(example, items if most is None else min(items, most))


def _tokens_of_text(
    config: EvalSettings,
    data: DataSettings,
    run_dir: Path,
    model_vocabulary: int | None,
    most: int | None,
) -> int:
    """Return how many tokens the text has, or a number that is not below `most`."""
    key = "eval.text"
    tokenizer = fitting_tokenizer(data, model_vocabulary)
    files = text_files(config.text or (), data, tokenizer, key)
    record = RunRecord(RunPaths(run_dir).eval_data, refuse=False)
    if record.is_there or data.cache is not None:
        digest = corpus_digest(hash_files(files, record.known, key=key), tokenizer.digest)
        root = record.path.parent if data.cache is None else Path(data.cache)
        found = tokens_on_disk(root, digest, tokenizer)
        if found is not None:
            return found
    total = 0
    for piece in document_tokens(files, tokenizer, key):
        total += len(piece)
        if most is not None and total >= most:
            break
    return total
