"""What several ranks do not do yet: refused by name, before anything is written."""

from __future__ import annotations

from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.program.ranks import Ranks
from swaptrain.ranks.launch import Launch
from swaptrain.ranks.own_disk import RANKS, check_rank_links
from swaptrain.store.format.root import read_root
from swaptrain.store.paths import TREES, RunPaths, rank_dir, rank_dirs, rank_links, rank_of
from swaptrain.units import how_many

__all__ = ["check_alone", "check_possible", "check_resharded", "check_together"]
__all__ += ["config_of_rank", "rank_count", "refuse_part", "step_committed"]

_NO_SNAPSHOTS = (
    "store.keep and --from-step: several ranks make no snapshots yet, since each would have to be "
    "one of all: leave them out, or train with one process"
)


def check_alone(run_dir: Path, *, plans: bool = False) -> None:
    """Raise ConfigError where one process would begin a run in the directory of several ranks.

    With `plans` it would only be planned.
    """
    check_rank_links(run_dir)
    check_resharded(run_dir)
    found = rank_count(run_dir)
    if found:
        start = (
            f"start it with torchrun (--nproc-per-node on each machine, {found} in all), or set "
            "run.dir to another directory"
        )
        instead = f"plan another one (run.dir=..., with --ranks {found})" if plans else start
        raise ConfigError(f"{run_dir} holds a run of {how_many(found, 'rank')}: {instead}")
    refuse_part(run_dir)


def rank_count(run_dir: Path) -> int:
    """Return how many ranks the run of a directory has, those of other machines too; 0: none."""
    directories = rank_dirs(run_dir) if run_dir.is_dir() else []
    roots = (read_root(directory, tree=tree) for directory in directories for tree in TREES)
    return max([len(directories), *(root.ranks for root in roots if root is not None)])


def refuse_part(run_dir: Path) -> None:
    """Raise ConfigError for the directory of one rank, which has a part of the weights."""
    for tree in TREES:
        root = read_root(run_dir, tree=tree)
        if root is not None and root.ranks > 1:
            whole = ", which has a link to it"
            if run_dir.parent.parent.name != RANKS:
                whole = f", {run_dir.parent}"
            raise ConfigError(
                f"{run_dir} has the segments of rank {root.rank} of {root.ranks}: give the "
                f"directory of the run{whole}"
            )


def check_resharded(run_dir: Path) -> None:
    """Raise ConfigError where a reshard was cut short."""
    if RunPaths(run_dir).is_being_resharded():
        raise ConfigError(
            f"{run_dir} was being divided anew when that was cut short: python -m swaptrain "
            f"reshard {run_dir} --ranks N completes it"
        )


def check_possible(config: Config, count: int) -> None:
    """Raise ConfigError for keys with which so many ranks cannot train, in one line each."""
    data, store = config.data, config.store
    if not Ranks(count=count).divide(data.micro_batches):
        near = -(-data.micro_batches // count) * count
        raise ConfigError(
            f"data.micro_batches is {data.micro_batches}, which {count} ranks cannot divide: "
            f"set it to a multiple of {count}, such as {near}"
        )
    if store.commit.unit == "segment":
        raise ConfigError(
            "store.commit.unit is segment, and several ranks commit a step as a whole: set it to "
            "step, or leave it out"
        )
    if store.keep is not None:
        raise ConfigError(_NO_SNAPSHOTS)
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


def check_together(config: Config, launch: Launch, *, from_step: int | None) -> None:
    """Raise ConfigError for what a run of several ranks cannot do, in one line each."""
    ranks = launch.ranks
    check_possible(config, ranks.count)
    if from_step is not None:
        raise ConfigError(_NO_SNAPSHOTS)
    check_resharded(config.run.dir)
    paths = RunPaths(config.run.dir)
    if paths.config.exists() or paths.store.exists():
        raise ConfigError(
            f"{config.run.dir} holds a run of one process: start it without torchrun, or set "
            "run.dir to another directory"
        )
    found = {*rank_dirs(config.run.dir), *rank_links(config.run.dir)}
    beyond = sorted(path for path in found if rank_of(path) >= ranks.count)
    if beyond:
        raise ConfigError(
            f"{config.run.dir} holds a run of more than {how_many(ranks.count, 'rank')} "
            f"({beyond[-1].name}): start as many as it began with"
        )


def config_of_rank(config: Config, launch: Launch, *, gpus: int) -> Config:
    """Return the config that one rank works with: its directory, its GPU, what is committed.

    `gpus` are those that this machine has. Raises ConfigError where they are too few, or one would
    be that of several ranks.
    """
    device = config.device
    if device.startswith("cuda:") and launch.local_count > 1:
        raise ConfigError(
            f"device is {device}, which the {how_many(launch.local_count, 'rank')} of this machine "
            "would share: set it to cuda, and each of them has a GPU of its own"
        )
    if device in ("auto", "cuda") and gpus:
        if launch.local_rank >= gpus:
            raise ConfigError(
                f"device is {device}, this machine has {how_many(gpus, 'GPU')}, and local rank "
                f"{launch.local_rank} has none: start {how_many(gpus, 'process', 'processes')} "
                "here (--nproc-per-node)"
            )
        device = f"cuda:{launch.local_rank}"
    run = config.run.model_copy(update={"dir": rank_dir(config.run.dir, launch.ranks.rank)})
    reporters = config.train.report_to if not launch.ranks.rank else ()
    train = config.train.model_copy(update={"report_to": reporters})
    changed = {"device": device, "run": run, "train": train}
    return step_committed(config).model_copy(update=changed)


def step_committed(config: Config) -> Config:
    """Return the config as ranks take it: a step is committed as a whole."""
    commit = config.store.commit.model_copy(update={"unit": "step"})
    return config.model_copy(update={"store": config.store.model_copy(update={"commit": commit})})
