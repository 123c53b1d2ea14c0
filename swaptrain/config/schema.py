"""The config as a tree of frozen, typed, documented fields; sizes are bytes once they are here."""

from __future__ import annotations

import math
from fractions import Fraction as Rational
from typing import Any, Literal

from pydantic import field_validator, model_validator

from swaptrain.config.kinds import (
    BatchCount,
    BytesOrPath,
    Count,
    Device,
    EntryPoint,
    Files,
    Folder,
    Folders,
    Globs,
    HfModel,
    Mask,
    Patterns,
    Positive,
    PositiveNumber,
    Prompts,
    Reporters,
    Seed,
    Size,
    Text,
    Weights,
)
from swaptrain.config.lora import LoraConfig
from swaptrain.config.optimizer import OptimizerConfig, ScheduleConfig
from swaptrain.config.paths import written_path
from swaptrain.config.section import Section
from swaptrain.config.yaml_text import dump_yaml, plain
from swaptrain.program.quantized import QuantizedAs
from swaptrain.units import GIB, KIB, exact_size, format_size

__all__ = ["CommitConfig", "Config", "DataConfig", "EvalConfig", "MemoryConfig", "ModelConfig"]
__all__ += [
    "DistributedConfig",
    "KeepConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "StoreConfig",
]
__all__ += ["TrainConfig"]

TokenDtype = Literal["uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
_PAGE_BYTES = 4096
_SIZES = (("memory", "host"), ("memory", "device"), ("memory", "segment"), ("store", "chunk"))
"""What is written with a unit."""
_PATHS = (
    *(
        ("model", "hf"),
        ("model", "weights"),
        ("lora", "from"),
        ("data", "text"),
        ("data", "chat"),
        ("data", "tokens"),
    ),
    *(
        ("data", "tokenizer"),
        ("data", "cache"),
        ("eval", "text"),
        ("eval", "chat"),
        ("eval", "tokens"),
        ("store", "paths"),
        ("run", "dir"),
    ),
)
"""What is written so that it is not expanded again."""


class ModelConfig(Section):
    """What is trained: exactly one of `hf` and `python`."""

    hf: HfModel | None = None
    """A directory with a Hugging Face `config.json`, the name of a model that the hub's local cache
    holds (`org/name`), or the config itself as a mapping with `model_type`. The run begins from the
    weights beside it (`model.safetensors`, or the files that `model.safetensors.index.json` names);
    where there are none, and for a mapping, from the architecture's own initialisation."""
    python: EntryPoint | None = None
    """`package.module:factory`, a function that returns an `nn.Module` whose `forward(**batch)`
    returns the loss: a scalar tensor, the first or the only scalar of a tuple, `loss` of a dict or
    of an object."""
    architecture: Text | None = None
    """A class of transformers, such as `BertForMaskedLM`, for `hf`. null: the one that the config's
    `architectures` name, or else that fits the data; where none or several do, they are listed."""
    resize_to_tokenizer: bool = False
    """true: where `data.tokenizer` has more tokens than the model of `hf`, its embeddings and head
    grow to as many rows, as transformers' `resize_token_embeddings` grows them."""
    kwargs: dict[str, Any] = {}
    """Arguments of the `python` factory."""
    weights: Weights | None = None
    """Weights that a model of `python` begins from: a file of safetensors, the index of several, a
    directory with either, or a name of the hub's local cache (`timm/...`). They are read tensor by
    tensor. The names are those of the module, or of one module inside of it. null: the run begins
    from what the factory makes."""
    weights_except: Patterns | None = None
    """Globs of names that are not taken from `weights`: what the module has of them begins as the
    factory makes it, such as a head for other classes. Anything else that `weights` lack, have
    beyond the module, or have in another shape is refused. null: none."""
    constants: dict[str, Any] = {}
    """Arguments of every forward that are no tensors, such as `{return_loss: true}` for CLIP."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What is computed in. With bfloat16 and float16 an exact float32 master of each weight is
    kept, and of the data's floating tensors only those are cast that a parameter's operation reads
    first. float16 scales the loss as torch's GradScaler does, and skips steps that overflow: for
    GPUs that have no bfloat16."""
    master: Literal["float32", "none"] = "float32"
    """What is kept of a bfloat16 weight beside it. float32: the rest of an exact float32 master.
    none: nothing, and each update rounds the weight by chance: 2 bytes a parameter of disk less,
    and another promise: see docs/optimizers.md."""
    base: QuantizedAs | None = None
    """How frozen weights lie on the disk and in RAM: int8 (a byte a weight, a scale a row) or nf4
    (half a byte a weight, a scale for each 64). They are decoded to `dtype` once a visit of a
    segment, and the run trains on what is left of them. The output head, embedding tables, tied
    weights and vectors stay as they are. null: as `dtype`."""
    base_except: Patterns | None = None
    """Globs of names of frozen weights that stay as `dtype` all the same."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        self._exactly_one("hf", "python")
        if self.kwargs and self.python is None:
            raise ValueError("kwargs belong to python; write the arguments of hf into its config")
        if self.weights is not None and self.python is None:
            raise ValueError("weights belong to python; those of hf lie beside its config.json")
        if self.weights_except is not None and self.weights is None:
            raise ValueError("weights_except belongs to weights, which is not set")
        if self.architecture is not None and self.hf is None:
            raise ValueError("architecture belongs to hf: it names a class of transformers")
        if self.resize_to_tokenizer and self.hf is None:
            raise ValueError("resize_to_tokenizer belongs to hf: a function makes its own table")
        if self.master == "none" and self.dtype != "bfloat16":
            raise ValueError("master: none belongs to dtype: bfloat16, whose weights it rounds")
        if self.base_except is not None and self.base is None:
            raise ValueError("base_except belongs to base: int8 or nf4")
        return self


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


class TrainConfig(Section):
    """How long, and how a step is carried out."""

    steps: Count | None = None
    """Optimizer steps; a finished run goes on when this is raised. 0: the initial weights become a
    store, to be exported or evaluated, and nothing is trained."""
    epochs: PositiveNumber | None = None
    """Instead of `steps`: how many times each item is taken; a part of an epoch counts too. The
    run records the number of steps: epochs x items / items of a step, rounded up."""
    seed: Seed = 0
    """Seed of the initial weights, the order of the data, and dropout."""
    freeze: Patterns | None = None
    """Globs of names of parameters that stay as they begin, such as `model.embed_tokens*`; `*`
    stands for anything. They have no optimizer state and are never rewritten, and the backward
    stops where nothing below learns. null: what the constructor freezes."""
    recompute: bool | None = None
    """Whether the backward recomputes what its segment's forward computed (true), or the forward
    saves it, in memory and on the disk (false, as far as there is room). null: per segment,
    whichever makes a step shorter. Never changes the result."""
    check_capture: bool | Literal["required"] = True
    """Whether two steps of the captured graph are compared with plain PyTorch before a run is
    created: losses, gradients, buffers, in float32 and within `memory.host`. Where they differ, the
    run is refused. What does not fit is compared with fewer layers (`model.hf`), or else the start
    says that it was not compared; `required` refuses the run then. false: no comparison."""
    threads: Positive | None = None
    """Intra-op threads of torch; they are part of the bits, and recorded. null: all cores."""
    loss_weighting: Literal["tokens", "micro_batches"] | None = None
    """What weighs alike in a step. tokens: every trained label (one that is not -100, counted where
    the loss reads it); micro_batches: every micro-batch, as the mean of their losses. They differ
    only where micro-batches have unequally many. null: tokens where the batch has `labels` and the
    loss a cross entropy that reads them, else micro_batches; recorded."""
    skip_ignored: bool = False
    """true: the head of a language model computes no row whose label is -100, such as those of a
    chat's questions. Fewer sums in another order: the bits are those of plain PyTorch whose forward
    leaves these rows out. Takes effect where the head is a linear layer that the loss alone reads.
    """
    report_to: Reporters = ()
    """Programs that are shown the rows of metrics.jsonl beside the run: tensorboard
    (`pip install 'swaptrain[tensorboard]'`, files in `RUN/tensorboard`) and trackio
    (`pip install 'swaptrain[trackio]'`); see docs/metrics.md. []: none."""
    deterministic: bool = False
    """On a GPU: only kernels that give the same bits each time, so that neither an interruption nor
    a budget changes the result. Some are slower, and a model that needs an operation without one is
    refused. A CPU's kernels always do."""

    channels_last: bool = False
    """true: images and weights of convolutions lie in memory with their channels last, as
    `model.to(memory_format=torch.channels_last)` has it. Other kernels, often faster ones: the bits
    are those of plain PyTorch laid out so."""
    cudnn_benchmark: bool = False
    """On a GPU: the fastest kernels of convolutions are chosen by a trial at each start. The choice
    may differ from start to start, and with it the last bits: not with `deterministic`."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.cudnn_benchmark and self.deterministic:
            raise ValueError(
                "cudnn_benchmark chooses kernels by their speed at each start: not with "
                "deterministic"
            )
        if self.steps is None and self.epochs is None:
            raise ValueError("give steps, such as train.steps=100, or epochs")
        self._exactly_one("steps", "epochs")
        return self

    @property
    def last_step(self) -> int:
        """The number of steps; to be asked once epochs have become steps."""
        if self.steps is None:
            raise AssertionError("train.epochs have not become steps yet")
        return self.steps


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
    """Prompts after which the model writes behind each evaluation, the likeliest token each time:
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


class MemoryConfig(Section):
    """Budgets, in bytes once loaded; written as sizes with a unit."""

    host: Size = 4 * GIB
    """RAM that the run may take beyond the base: torch, the captured graph, the data."""
    device: Size | None = None
    """Most memory that torch may take on the CUDA device, beside its context. null: no limit. Not
    for `device: cpu`."""
    segment: Size | None = None
    """Largest state of one segment. null: chosen from the budgets at creation, and recorded."""
    experts: Positive | None = None
    """Experts of a mixture that are stored and computed together: a layer's stacks of more are
    divided into ranges, between which segments may end. null: none is divided where a whole one
    fits the budgets, else into ranges of about the size of a segment; recorded."""


class KeepConfig(Section):
    """Snapshots of earlier steps, to which `--from-step N` goes back."""

    every: Positive | None = None
    """A snapshot is made of each step whose number is a multiple of this. With
    `store.commit.every` > 1 such a step is committed. null: of the `best` alone."""
    last: Positive = 2
    """How many of every so many steps are kept; the oldest goes when there is one more. Each takes
    the disk of the state once more, reserved at the start."""
    best: Positive | None = None
    """How many are kept of the steps of lowest held-out loss (`eval`) beside those; one that is as
    low as an earlier one is not lower. Each takes the disk of the state once more, too. With
    `store.commit.every` > 1 such a step is committed. null: none."""

    @model_validator(mode="after")
    def _check(self) -> KeepConfig:
        if self.every is None and self.best is None:
            raise ValueError(
                "names no steps: give every (each so many), best (of lowest held-out loss), or both"
            )
        return self


class CommitConfig(Section):
    """When a step becomes durable, and what a killed run repeats."""

    unit: Literal["segment", "step"] | None = None
    """What is committed together. segment: each segment's state after its update, with activations
    and gradients on their way; a killed run repeats at most one segment's backward (or two: `lag`).
    step: the whole state at the end of a step, and nothing inside it; a killed run repeats the
    step, the disk holds the trained state twice, and writes least. null: `step` where the state
    that a step writes is smaller than what crosses between its segments, as with adapters, or where
    `every` > 1, else `segment`; recorded."""
    every: Positive = 1
    """Steps between commits; more than 1 with the unit `step` only."""
    lag: Literal[1, 2] | None = None
    """Segments whose backward a killed run may have to do again, with the unit `segment`. 2: a
    commit has all micro-batches of the next segment to become durable instead of the first one,
    which makes steps shorter where the disk takes about as long as the processor. null: 2 where a
    start finds that it makes them a twentieth shorter, else 1."""

    @property
    def is_whole(self) -> bool:
        """Whether the state is committed as a whole; False also while that is to be chosen."""
        return self.unit == "step" or self.every > 1

    @model_validator(mode="after")
    def _check(self) -> CommitConfig:
        if self.unit == "segment" and self.every > 1:
            raise ValueError(
                f"every is {self.every}, and unit is segment, which is committed in each step: set "
                "unit to step, or every to 1"
            )
        return self


class StoreConfig(Section):
    """Where the training state lies on disk, and how often it becomes durable."""

    paths: Folders | None = None
    """Directories on one or several disks, which take the slots in turn; the directory that one is
    in has to exist. null: `run.dir`."""
    chunk: Size | None = None
    """Largest chunk file: a multiple of 4096 bytes from 8KiB to 1GiB. An update goes through what
    only it reads by chunks, a sixteenth of a segment or more at a time: smaller ones need less
    memory. null: chosen at creation by the size of the segments, 1MiB to 64MiB, and recorded."""
    commit: CommitConfig = CommitConfig()
    """When a step becomes durable, and what a killed run repeats."""
    verify: Literal["always", "first_read", "never"] = "first_read"
    """When the checksum of a chunk is compared as it is read. first_read: once for what an earlier
    process wrote; always: also each time for what this process wrote itself; never: not at all (a
    chunk that is missing or too short stops the run in any case)."""
    keep: KeepConfig | None = None
    """null: no snapshots are made; those that a run has stay until they are deleted."""

    @field_validator("chunk")
    @classmethod
    def _check_chunk(cls, chunk: int | None) -> int | None:
        if chunk is not None and (not 8 * KIB <= chunk <= GIB or chunk % _PAGE_BYTES):
            raise ValueError(
                f"found {exact_size(chunk)}; it must be a multiple of 4096 bytes from 8KiB to "
                "1GiB, such as 64MiB"
            )
        return chunk


class RunConfig(Section):
    """Where the run keeps everything it writes."""

    dir: Folder
    """Directory of the run: config, store, metrics. Started again, a run goes on from it."""
    trace: Count = 0
    """Steps of this start of which `trace.json` says what every thread did when: ui.perfetto.dev
    shows it, `scripts/step_times.py` sums it up; some 0.1 to 0.5 MB a step. 0: none."""
    memory: bool = False
    """true: `memory.json` says after each step what held memory at each of its instructions, and a
    note names what grows from step to step; `inspect RUN --memory` shows it (docs/memory.md)."""
    log_every: Positive | None = None
    """Steps between two lines of output that goes to no terminal; the first, the last and the
    evaluated steps have one as well. null: a line where ten seconds have passed and a hundredth of
    the run. A terminal shows each step."""


class DistributedConfig(Section):
    """Several processes that train one model, started by torchrun; see docs/distributed.md."""

    timeout: PositiveNumber = 1800.0
    """Seconds that a process waits for the others, at the start or inside of a step: where one has
    died, or the network hangs, all end with exit 1, and the same command goes on. It has to be
    longer than the longest instruction, and than the longest part of a start."""


class Config(Section):
    """One training job."""

    model: ModelConfig
    lora: LoraConfig | None = None
    """null: the model itself is trained."""
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    eval: EvalConfig | None = None
    """null: no evaluation."""
    device: Device = "auto"
    """auto (cuda where there is one), cpu, cuda or cuda:N."""
    memory: MemoryConfig = MemoryConfig()
    store: StoreConfig = StoreConfig()
    distributed: DistributedConfig = DistributedConfig()
    run: RunConfig

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.device == "cpu" and self.memory.device is not None:
            raise ValueError(
                f"memory.device is {format_size(self.memory.device)}, but device is cpu, where "
                "only memory.host counts: set memory.device to null"
            )
        if self.store.keep is not None and self.store.keep.best and self.eval is None:
            raise ValueError(
                "store.keep.best keeps steps of lowest held-out loss, and there is no eval section "
                "that measures it"
            )
        if self.model.resize_to_tokenizer and self.data.tokenizer == "bytes":
            raise ValueError(
                "model.resize_to_tokenizer needs data.tokenizer: the directory of the tokenizer "
                "that has more tokens than the model"
            )
        splits, own = self.data.held_out is not None, self.eval is None or self.eval.own_source
        if self.eval is not None and not own and not splits:
            raise ValueError(
                "eval names no data: give one of text, chat, tokens and python, or set "
                "data.held_out, which leaves a part of the rows of data.chat"
            )
        if splits and own:
            raise ValueError(
                f"data.held_out is {self.data.held_out:g}, and no eval section reads these rows: "
                "add eval: {every: 100}, without data of its own"
            )
        return self

    def resolved(self) -> Config:
        """Return the config with `optimizer.schedule.decay_steps` fixed: what a run records.

        It stays open while the number of steps is not known, or none is trained.
        """
        schedule = self.optimizer.schedule
        if schedule.decay_steps is not None or not self.train.steps:
            return self
        schedule = schedule.model_copy(update={"decay_steps": self.train.steps})
        optimizer = self.optimizer.model_copy(update={"schedule": schedule})
        return self.model_copy(update={"optimizer": optimizer})

    def with_steps_of(self, items: int) -> Config:
        """Return the config with `train.epochs` of so many items as `train.steps`."""
        if self.train.epochs is None:
            return self
        step_items = self.data.micro_batch * self.data.micro_batches
        steps = math.ceil(Rational(str(self.train.epochs)) * items / step_items)
        train = self.train.model_copy(update={"steps": steps, "epochs": None})
        return self.model_copy(update={"train": train})

    def to_tree(self) -> dict[str, Any]:
        """Return the config as plain values, as in the YAML file: sizes have their unit again."""
        tree: dict[str, Any] = plain(self.model_dump(by_alias=True))
        for section, key in _SIZES:
            if tree[section][key] is not None:
                tree[section][key] = exact_size(tree[section][key])
        for section, key in _PATHS:
            found = (tree[section] or {}).get(key)
            if isinstance(found, str):
                tree[section][key] = written_path(found)
            elif isinstance(found, list):
                tree[section][key] = [written_path(path) for path in found]
        return tree

    def resolved_yaml(self) -> str:
        """Write `resolved()` as YAML, which loads back to an equal Config."""
        return dump_yaml(self.resolved().to_tree())
