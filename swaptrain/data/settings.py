"""What this room reads of the config: the fields of `data` and `eval`, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from swaptrain.chat.turns import TrainOn

__all__ = ["DataSettings", "EvalSettings", "SourceSettings"]


class SourceSettings(Protocol):
    """Where items come from: at most one of text, chat, tokens and python is set."""

    @property
    def text(self) -> Sequence[str] | None:
        """Globs of text files."""

    @property
    def chat(self) -> Sequence[str] | None:
        """Globs of files of conversations, prompts, or other rows."""

    @property
    def tokens(self) -> Sequence[str | Path] | None:
        """Files or zarr arrays of token ids."""

    @property
    def token_dtype(self) -> str | None:
        """What the numbers of `.bin` files are; None: found out, or as `data` says."""

    @property
    def python(self) -> str | None:
        """`package.module:function` that returns a map-style dataset."""

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Arguments of that function."""


class DataSettings(SourceSettings, Protocol):
    """The fields of the config's `data` section."""

    @property
    def tokenizer(self) -> str | Path:
        """`bytes`, or the directory of a Hugging Face tokenizer."""

    @property
    def parse_special(self) -> bool:
        """Whether special tokens that stand in a text are tokens."""

    @property
    def text_as_is(self) -> bool:
        """Whether files are taken without asking whether they are text."""

    @property
    def chat_template(self) -> str | None:
        """A file, or Jinja; None: the tokenizer's own."""

    @property
    def train_on(self) -> TrainOn | None:
        """Which tokens of a row are trained; None: as its columns say."""

    @property
    def mask_history(self) -> bool:
        """Whether only the last turn of a conversation is trained."""

    @property
    def packing(self) -> bool | None:
        """Whether several rows share a sequence; None: not decided yet."""

    @property
    def held_out(self) -> float | None:
        """The part of the rows that is left for evaluation."""

    @property
    def collate(self) -> str | None:
        """`package.module:function` that makes a micro-batch of a list of items."""

    @property
    def workers(self) -> int:
        """Processes that make the items of a Python dataset ahead."""

    @property
    def sequence_length(self) -> int:
        """Tokens in one item."""

    @property
    def mask(self) -> float | None:
        """The part of the tokens that is masked; None: the next token is predicted."""

    @property
    def micro_batch(self) -> int:
        """Items in one micro-batch."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step."""

    @property
    def shuffle(self) -> bool:
        """Whether the items are permuted anew in each epoch."""

    @property
    def cache(self) -> str | Path | None:
        """A directory that runs share for tokenised text; None: the run's own."""


class EvalSettings(SourceSettings, Protocol):
    """The fields of the config's `eval` section that concern data."""

    @property
    def batches(self) -> int | Literal["all"]:
        """Most micro-batches in one evaluation; all: as many as the data has."""
