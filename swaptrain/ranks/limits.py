"""What several ranks do not do yet: refused by name, before anything is written."""

from __future__ import annotations

from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.ranks.launch import Launch
from swaptrain.store.format.root import read_root
from swaptrain.store.paths import TREES, RunPaths, rank_dir, rank_dirs

__all__ = ["check_alone", "check_resharded", "check_together", "config_of_rank", "refuse_part"]


def check_alone(run_dir: Path) -> None:
    """Raise ConfigError where one process would begin a run in the directory of several ranks."""
    check_resharded(run_dir)
    found = len(rank_dirs(run_dir)) if run_dir.is_dir() else 0
    if found:
        raise ConfigError(
            f"{run_dir} holds a run of {found} ranks: start it with torchrun (--nproc-per-node on "
            f"each machine, {found} in all), or set run.dir to another directory"
        )
    refuse_part(run_dir)


def refuse_part(run_dir: Path) -> None:
    """Raise ConfigError for the directory of one rank, which has a part of the weights."""
    for tree in TREES:
        root = read_root(run_dir, tree=tree)
        if root is not None and root.ranks > 1:
            raise ConfigError(
                f"{run_dir} has the segments of rank {root.rank} of {root.ranks}: give the "
                f"directory of the run, {run_dir.parent}"
            )


def check_resharded(run_dir: Path) -> None:
    """Raise ConfigError where a reshard was cut short."""
    if RunPaths(run_dir).is_being_resharded():
        raise ConfigError(
            f"{run_dir} was being divided anew when that was cut short: python -m swaptrain "
            f"reshard {run_dir} --ranks N completes it"
        )


def check_together(config: Config, launch: Launch, *, from_step: int | None) -> None:
    """Raise ConfigError for what a run of several ranks cannot do, in one line each."""
    ranks, data, store = launch.ranks, config.data, config.store
    if data.micro_batches % ranks.count:
        near = -(-data.micro_batches // ranks.count) * ranks.count
        raise ConfigError(
            f"data.micro_batches is {data.micro_batches}, which {ranks.count} ranks cannot divide: "
            f"set it to a multiple of {ranks.count}, such as {near}"
        )
    if store.commit.unit == "segment":
        raise ConfigError(
            "store.commit.unit is segment, and several ranks commit a step as a whole: set it to "
            "step, or leave it out"
        )
    if store.keep is not None or from_step is not None:
        raise ConfigError(
            "store.keep and --from-step: several ranks make no snapshots yet, since each would "
            "have to be one of all: leave them out, or train with one process"
        )
    if config.eval is not None and config.eval.samples:
        raise ConfigError(
            "eval.samples: several ranks write no texts while they train, since each has a part of "
            "the weights: leave it out"
        )
    if config.model.dtype == "float16":
        raise ConfigError(
            "model.dtype is float16, whose loss scale several ranks do not agree on yet: use "
            "bfloat16 or float32"
        )
    check_resharded(config.run.dir)
    paths = RunPaths(config.run.dir)
    if paths.config.exists() or paths.store.exists():
        raise ConfigError(
            f"{config.run.dir} holds a run of one process: start it without torchrun, or set "
            "run.dir to another directory"
        )
    beyond = [path for path in rank_dirs(config.run.dir) if int(path.name[-3:]) >= ranks.count]
    if beyond:
        raise ConfigError(
            f"{config.run.dir} holds a run of more than {ranks.count} ranks ({beyond[-1].name}): "
            "start as many as it began with"
        )


def config_of_rank(config: Config, launch: Launch, *, gpus: int) -> Config:
    """Return the config that one rank works with: its directory, its GPU, what is committed.

    `gpus` are those that this machine has.
    """
    device = config.device
    if device in ("auto", "cuda") and gpus:
        if launch.local_rank >= gpus:
            raise ConfigError(
                f"device is {device}, this machine has {gpus} GPUs, and local rank "
                f"{launch.local_rank} has none: start {gpus} processes here (--nproc-per-node)"
            )
        device = f"cuda:{launch.local_rank}"
    commit = config.store.commit.model_copy(update={"unit": "step"})
    store = config.store.model_copy(update={"commit": commit})
    run = config.run.model_copy(update={"dir": rank_dir(config.run.dir, launch.ranks.rank)})
    reporters = config.train.report_to if not launch.ranks.rank else ()
    train = config.train.model_copy(update={"report_to": reporters})
    changed = {"device": device, "store": store, "run": run, "train": train}
    return config.model_copy(update=changed)
