"""The config as a tree of frozen, typed, documented fields; sizes are bytes once they are here."""

from __future__ import annotations

import math
from fractions import Fraction as Rational
from typing import Any

from pydantic import model_validator

from swaptrain.config.data import DataConfig, EvalConfig
from swaptrain.config.kinds import Count, Device, Folder, Folders, Positive, PositiveNumber, Size
from swaptrain.config.lora import LoraConfig
from swaptrain.config.model import ModelConfig
from swaptrain.config.optimizer import OptimizerConfig
from swaptrain.config.paths import written_path
from swaptrain.config.section import Section
from swaptrain.config.store import StoreConfig
from swaptrain.config.train import TrainConfig
from swaptrain.config.yaml_text import dump_yaml, plain
from swaptrain.units import GIB, exact_size, format_size

__all__ = ["Config", "DistributedConfig", "MemoryConfig", "RunConfig"]

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
        ("distributed", "dirs"),
        ("run", "dir"),
    ),
)
"""What is written so that it is not expanded again."""


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
    rows: Positive | None = None
    """Rows of an embedding that are stored and looked up together: embeddings of more, which no
    head is tied to, are divided into ranges, between which segments may end. null: as `experts`."""
    tokens: Positive | None = None
    """What treats each token by itself (an MLP with its norm, a head with its cross entropy) is
    computed over ranges of so many tokens, forward and backward: for long sequences, whose
    activations fill the memory. Other last bits, the same for each budget and cut. null: all tokens
    at once, as plain PyTorch does."""


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
    dirs: Folders | None = None
    """A directory for each process of a machine, by its local rank, on disks of their own; the
    directory that one is in has to exist. `run.dir/rank-NNN` is a link then. null: `run.dir` has
    all of them."""


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
        if self.distributed.dirs is not None and self.store.paths is not None:
            raise ValueError(
                "distributed.dirs gives each process a disk, and store.paths all of them the same "
                "ones: leave one of them out"
            )
        if self.lora is not None and self.model.master == "none":
            raise ValueError(
                "model.master: none would round adapters by chance, and they are written with "
                "float32 masters: leave it out"
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
