"""What is decided before a byte is written: device, model, cut, budgets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swaptrain.capture.head.trained_rows import skips_ignored
from swaptrain.capture.tokens.rewriting import has_ranges
from swaptrain.compute.device import choose_kernels, load_libraries, open_device
from swaptrain.compute.weighting.choice import LossWeighting, choose_weighting
from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.data import HeldOut, look_at_held_out, open_example
from swaptrain.errors import ConfigError
from swaptrain.models.adapters.lora import adapter_fields, checked_fields
from swaptrain.models.build import BuiltModel, build, model_factory
from swaptrain.models.factory import Factory
from swaptrain.planning.other_ranks import (
    NOBODY,
    FixedCut,
    OtherRanks,
    check_divisible,
    check_whole,
)
from swaptrain.planning.planner import Plan, Planner
from swaptrain.planning.step_bytes import with_commit_unit
from swaptrain.planning.update_rules import update_rules
from swaptrain.store.disk.durable_files import disk_errors
from swaptrain.store.format.root import RootRecord, read_buffers, read_root, refuse_tmpfs
from swaptrain.store.paths import RunPaths
from swaptrain.units import how_many

__all__ = ["Prepared", "recorded_config"]


class Prepared:
    """A model that is captured, cut and fits its budgets; nothing is written.

    `root` is the record of the run that is resumed, whose cut is kept; `beside` are other ranks of
    it, whose segments are the same. `note` hears of the long work. Without `draw` there are no
    initial weights, for those who only look. Raises ConfigError for everything about the config,
    the model and the budgets that is wrong.
    """

    def __init__(
        self,
        config: Config,
        root: RootRecord | None,
        note: Callable[[str], None],
        *,
        draw: bool = True,
        beside: OtherRanks = NOBODY,
    ) -> None:
        refuse_tmpfs(config.run.dir)
        for path in config.store.paths or ():
            refuse_tmpfs(path)
            _check_parent(path)
        self.threads = _set_threads(config, root, note, processes=beside.local_count)
        self.device = open_device(beside.device or config.device, config.memory.device)
        choose_kernels(
            self.device.device,
            deterministic=config.train.deterministic,
            benchmark=config.train.cudnn_benchmark,
        )
        load_libraries(self.device.device)
        update_rules(config.optimizer, config.train.seed)  # before the capture: it may refuse
        example = None
        if config.data.python is not None:  # whose keys say what the model is for
            example = open_example(
                config.data, model_vocabulary=None, most_bytes=config.memory.host
            )
        self.factory: Factory = model_factory(config, example, asks=root is None, note=note)
        config = _with_packing(config, self.factory, note)
        if example is None:
            example = open_example(
                config.data,
                model_vocabulary=self.factory.vocabulary,
                most_bytes=config.memory.host,
            )
        held_out = _held_out(config, self.factory.vocabulary, example)
        note(f"capturing {self.factory.description}")
        self.adapter: Mapping[str, Any] | None = _adapter(config, root)
        """Fields of PEFT's LoraConfig; None where the model itself is trained."""
        self.built: BuiltModel = _built(
            config, root, self.factory, self.adapter, example, held_out, note, draw=draw
        )
        self.weighting: LossWeighting = choose_weighting(config, self.built.uncut.losses, example)
        module = self.built.initial.module
        self.rules = update_rules(config.optimizer, config.train.seed, module)
        note(self.built.trained.line())
        if self.built.thawed:
            note(
                f"{', '.join(self.built.thawed[:3])}: the constructor freezes them, and "
                "transformers trains them when it loads a checkpoint: so does this run"
            )
        check_whole(self.built.uncut, beside.ranks)
        note("measuring what each kind of segment takes")
        chooses = root is None and not beside.ranks.rank
        fixed = None if chooses or root is not None else beside.same_cut(None)
        self.planner = Planner(
            config,
            self.built,
            self.rules,
            self.device,
            dict(self.built.uncut.batch),
            choices=root.choices if root is not None else fixed,
            creates=root is None,
            positions=self.factory.positions,
            measures=RunPaths(config.run.dir).measured,
            ranks=beside.ranks,
        )
        self.plan: Plan = self.planner.plan()
        if chooses:
            beside.same_cut(
                FixedCut(tuple(self.plan.cuts), self.plan.layouts.chunk_bytes, self.plan.ranges)
            )
        check_divisible(self.plan.layouts.state_arrays, beside.ranks)
        if config.train.skip_ignored and not skips_ignored(
            code.train for code in self.plan.captured.codes
        ):
            raise ConfigError(
                "train.skip_ignored: no linear layer of the model makes logits for its loss alone, "
                "or a segment ends between the two: set it to false"
            )
        if config.memory.tokens is not None and not has_ranges(
            code.train for code in self.plan.captured.codes
        ):
            raise ConfigError(
                f"memory.tokens is {config.memory.tokens}, and no part of the model that treats "
                "each token by itself, an MLP or a head with its loss, has more tokens in a "
                "micro-batch: set it to less, or to null"
            )
        self.config = with_commit_unit(self.weighting.config, self.plan, root)
        """With what depends on the model written out."""
        if root is not None and root.fingerprint != self.plan.captured.model.fingerprint:
            raise ConfigError(
                f"{config.run.dir} holds another model than the config now gives: the code of the "
                "model or the version of torch or transformers has changed since. Restore it, or "
                "start over with --fresh"
            )


def _with_packing(config: Config, factory: Factory, note: Callable[[str], None]) -> Config:
    """Return the config with `data.packing` decided, by a trial of the model; raises ConfigError.

    A run that exists has it recorded.
    """
    if config.data.chat is None:
        return config
    apart = config.data.packing is not False and factory.keeps_rows_apart()
    if config.data.packing and not apart:
        raise ConfigError(
            f"data.packing is true, and a trial does not show that {factory.description} keeps "
            "rows of one sequence apart: set it to false, and each row has a sequence of its own"
        )
    if config.data.packing is None and not apart:
        note(
            f"each row has a sequence of its own, with padding: a trial does not show that "
            f"{factory.description} keeps rows of one sequence apart"
        )
    if not apart and factory.reads_padding():
        raise ConfigError(
            f"data.chat: rows are padded for {factory.description}, and a trial shows that its "
            "loss changes with the padding, as where routers have a loss of their own "
            "(output_router_logits): set that to false, or give items by data.python"
        )
    data = config.data.model_copy(update={"packing": apart})
    return config.model_copy(update={"data": data})


def _check_parent(path: Path) -> None:
    """Refuse one of `store.paths` in a directory that is not there: its disk may not be mounted."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(
            f"store.paths: {path} lies in {parent}, which does not exist: mount its disk, correct "
            "the name, or make that directory"
        )


def _built(
    config: Config,
    root: RootRecord | None,
    factory: Factory,
    adapter: Mapping[str, Any] | None,
    example: Mapping[str, torch.Tensor],
    held_out: HeldOut | None,
    note: Callable[[str], None],
    *,
    draw: bool,
) -> BuiltModel:
    """Build the model, of a run that goes on without drawing its initial weights again.

    Only where its graph or a constant is another then, since numbers that the constructor drew are
    in them, or where an evaluation reads tensors that nothing has recorded, are they drawn all the
    same.
    """
    if root is None:
        return build(
            config, factory, example, adapter=adapter, draw=draw, held_out=held_out, note=note
        )
    buffers = read_buffers(config.run.dir)
    thawed = root.choices.thawed
    again = partial(
        build,
        config,
        factory,
        example,
        adapter=adapter,
        held_out=held_out,
        buffers=buffers,
        thawed=thawed,
    )
    built = again(draw=False)
    drawn = any(graph.own_attributes for graph in built.evaluations)
    if draw and (drawn or built.content != root.choices.content):
        return again(draw=True)
    return built


def _adapter(config: Config, root: RootRecord | None) -> Mapping[str, Any] | None:
    """Return the fields of the adapters: as recorded, or as the config has them."""
    if config.lora is None:
        return None
    if root is not None and root.adapter is not None:
        return checked_fields(root.adapter.fields, f"the record of {config.run.dir}")
    return adapter_fields(config.lora)


def recorded_config(run_dir: Path) -> Config | None:
    """Return the config that a run was created with; None where there is no run."""
    path = RunPaths(run_dir).config
    with disk_errors(path, "read"):
        if not path.exists():
            return None
        try:
            return load_config(path, ())
        except ConfigError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # a disk that fails is no fault of the config
            read_root(run_dir)  # refuses a store of another format, whose config has other keys
            raise


def _held_out(
    config: Config, vocabulary: int | None, example: Mapping[str, torch.Tensor]
) -> HeldOut | None:
    """Look at the held-out data: missing, too short, or of another kind than the training data?

    `open_eval` would say so too, but only once the training data is in the run directory.
    """
    if config.eval is None:
        return None
    held_out = look_at_held_out(
        config.eval,
        config.data,
        run_dir=config.run.dir,
        model_vocabulary=vocabulary,
        most_bytes=config.memory.host,
    )
    found, expected = _layout(held_out.example), _layout(example)
    if found != expected:
        raise ConfigError(
            f"eval: its items have {found}, those of data have {expected}: the model takes one "
            "kind, make them the same"
        )
    return held_out


def _layout(batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor of an item, by key."""
    return {key: (tuple(value.shape[1:]), value.dtype) for key, value in batch.items()}


def _set_threads(
    config: Config, root: RootRecord | None, note: Callable[[str], None], *, processes: int
) -> int:
    """Use the recorded number of intra-op threads: sums are split by it, so bits depend on it.

    So many `processes` of the run share the cores.
    """
    available = max(1, len(os.sched_getaffinity(0)) // processes)
    recorded: int | None = root.choices.threads if root is not None else None
    threads = recorded or config.train.threads or available
    if recorded is not None and recorded > available:
        note(
            f"the run was begun with {how_many(recorded, 'thread')} and this machine has "
            f"{how_many(available, 'core')}: it goes on with as many threads, slower, so that the "
            "bits stay the same"
        )
    torch.set_num_threads(threads)
    return threads
