"""The sections `data` and `eval`: what a model is trained on, and what its loss is measured on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from swaptrain.config.kinds import (
    BatchCount,
    BytesOrPath,
    Count,
    EntryPoint,
    Files,
    Folder,
    Globs,
    Mask,
    Positive,
    Prompts,
    Text,
)
from swaptrain.config.section import Section

__all__ = ["DataConfig", "EvalConfig"]

TokenDtype = Literal["uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


class DataConfig(Section):
    """What it is trained on: exactly one of `text`, `chat`, `tokens` and `python`."""

    text: Globs | None = None
    """Globs of text files. Documents are taken in sorted order, each followed by an end token, and
    packed into sequences; the last partial sequence is dropped. A leading `{stdlib}` stands for the
    directory of Python's own standard library: text that every machine has. Links to directories
    are followed, though not into one that is on the path already, and each file counts once,
    whatever names lead to it. Line ends stay as they are."""
    chat: Globs | None = None
    """Globs of files of conversations and other rows: `.jsonl`, `.json`, `.csv`, and with
    `pip install 'swaptrain[data]'` `.parquet` and directories that `datasets` saved. A row is what
    its columns say: `messages`, `conversations` (`from`, `value`), `prompt` and `completion`,
    `instruction` and `output`, `text`, or `input_ids` and `labels`."""
    chat_template: Text | None = None
    """A file of Jinja, or Jinja itself. null: the template of `tokenizer`."""
    train_on: Literal["assistant", "completion", "all"] | None = None
    """Which tokens of a row of `chat` are trained: the turns of the assistant, the last of them or
    the column `completion`, or all. null: completions where a row names them, else the turns of the
    assistant, and all of `text`."""
    mask_history: bool = False
    """true: of the turns that are trained only the last one is."""
    packing: bool | None = None
    """Whether several rows of `chat` share a sequence, with attention and positions of their own;
    false: each has a sequence, with padding. null: packed where a trial shows that the model keeps
    rows apart; recorded."""
    held_out: Mask | None = None
    """The part of the rows of `chat`, such as 0.02, that is left for an `eval` section without data
    of its own: by a hash of each row. null: none."""
    tokens: Files | None = None
    """Files of token ids: `.bin` (raw, see `token_dtype`), `.npy`, or a zarr array."""
    token_dtype: TokenDtype | None = None
    """What the little-endian numbers of `.bin` files are. null: what a header of llm.c or the
    `.idx` of Megatron-LM beside the file says, else uint16. That is refused where the model has
    more than 65,536 words, and where the numbers look like wider or big-endian ones."""
    python: EntryPoint | None = None
    """`package.module:function`, returning a map-style dataset of dicts of tensors, which are
    collated by stacking. An item may draw from the global generators of torch, numpy and Python:
    they are seeded from `train.seed`, the epoch and the item, and with 0 for the call of the
    function, whose random choices are thus those of every start. Generators, counters and iterators
    of the dataset's own are refused: eight items are read twice at the start."""
    kwargs: dict[str, Any] = {}
    """Arguments of the `python` function."""
    collate: EntryPoint | None = None
    """`package.module:function` that makes a micro-batch, a dict of tensors [items, ...], of a list
    of items of the `python` dataset. null: tensors are stacked. Shapes are the same each time."""
    workers: Count = 0
    """Processes that make the items of the `python` dataset ahead, the same bits for any number;
    each takes some 300 MB beside `memory.host`. 0: they are made where they are asked for."""
    tokenizer: BytesOrPath = "bytes"
    """`bytes`, or a directory with a Hugging Face tokenizer; a name of the hub as in `model.hf`."""
    parse_special: bool = False
    """Whether special tokens that stand in a document, such as `<|end|>`, are read as the tokens.
    false: a document is text, whatever stands in it."""
    text_as_is: bool = False
    """true: every file of `text` is taken, byte order marks, NUL bytes and `.jsonl` or `.gz`
    included. false: what is no text by its name or content is refused, and a UTF-8 byte order mark
    is dropped."""
    sequence_length: Positive = 512
    """Tokens per sequence, for `text`, `chat` and `tokens`."""
    micro_batch: Positive = 1
    """Sequences (or items) per micro-batch."""
    micro_batches: Positive = 1
    """Micro-batches per step, which minimises their loss: `train.loss_weighting` says how each
    counts."""
    mask: Mask | None = None
    """The part of a sequence's tokens that a masked-language model predicts, such as 0.15, for
    `text` and `tokens`: of these 80 % are masked, 10 % are random and 10 % stay. It needs the mask
    token of a Hugging Face tokenizer. null: the next token is predicted."""
    shuffle: bool = True
    """A new order in each epoch, a function of `train.seed` and the position; false: in order."""
    cache: Folder | None = None
    """Directory for tokenised text, which several runs may share. null: inside `run.dir`."""

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        self._exactly_one("text", "chat", "tokens", "python")
        if self.kwargs and self.python is None:
            raise ValueError("kwargs belong to python, which is not set")
        if self.python is None:
            for name in ("collate", "workers"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to python, which is not set")
        if self.chat is None:
            for name in ("chat_template", "train_on", "mask_history", "packing", "held_out"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to chat, which is not set")
        elif self.tokenizer == "bytes":
            raise ValueError(
                "chat needs tokenizer: the directory of a Hugging Face tokenizer, such as the "
                "model's"
            )
        if self.mask is not None and self.chat is not None:
            raise ValueError("mask belongs to text and tokens; conversations train by turns")
        if self.mask is not None and self.python is not None:
            raise ValueError("mask belongs to text and tokens; a python dataset masks by itself")
        if self.mask is not None and self.tokenizer == "bytes":
            raise ValueError(
                "mask needs a mask token, and tokenizer is bytes, which has none: set tokenizer to "
                "the directory of a Hugging Face tokenizer that has one, for token files to the "
                "one that they were made with"
            )
        return self


class EvalConfig(Section):
    """Held-out loss during training: one of `text`, `chat`, `tokens` and `python`.

    None of them: the rows that `data.held_out` leaves.
    """

    text: Globs | None = None
    """Globs of held-out text files, read with the tokenizer and lengths of `data`, in order."""
    chat: Globs | None = None
    """Globs of held-out files of rows, read as `data` says."""
    tokens: Files | None = None
    """Files of held-out token ids."""
    token_dtype: TokenDtype | None = None
    """As `data.token_dtype`, whose value is taken where this is null."""
    python: EntryPoint | None = None
    """`package.module:function`, returning a dataset as in `data.python`."""
    kwargs: dict[str, Any] = {}
    """Arguments of the `python` function."""
    every: Positive
    """Steps between evaluations."""
    first: bool = True
    """Whether the loss is taken before step 1 as well: `eval_loss_before` in the line of step 1."""
    patience: Positive | None = None
    """The run ends when its held-out loss has not been lower for so many evaluations; with null, or
    raised, the same command goes on. null: it ends with `train.steps`."""
    samples: Prompts | None = None
    """Prompts that the model continues after each evaluation, by the likeliest token each time:
    to `RUN/samples.jsonl`, and the beginning to the output. With `data.chat` a prompt is a user's
    message, where there is a chat template. Meanwhile memory holds nothing else. null: none."""
    sample_tokens: Positive = 64
    """Most tokens of each of these texts."""
    batches: BatchCount = 8
    """Most micro-batches (of `data.micro_batch` items) per evaluation, from the start of the
    held-out data; all: as many as there are. Each item counts once: data with fewer items is taken
    whole, and the last micro-batch may be smaller."""

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        if self.own_source:
            self._exactly_one("text", "chat", "tokens", "python")
        if self.kwargs and self.python is None:
            raise ValueError("kwargs belong to python, which is not set")
        return self

    @property
    def own_source(self) -> bool:
        """Whether it names data, instead of what `data.held_out` leaves."""
        names = (self.text, self.chat, self.tokens, self.python)
        return any(name is not None for name in names)
