"""What several verbs of the command line take: a config, a run directory, a step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swaptrain.config.load import load_config
from swaptrain.config.paths import expand_argument
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.observe.output import silence

__all__ = ["Arguments", "check_run", "config_arguments", "load", "run_arguments", "say"]
__all__ += ["say_first", "step_argument", "whole_run"]

Arguments = argparse.Namespace


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --config, and keys to set over it."""
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="the YAML file that describes the job",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY.SUB=VALUE",
        help="config keys to set over the file, such as train.steps=100 memory.host=8GiB",
    )


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory (run.dir)")


def step_argument(parser: argparse.ArgumentParser) -> None:
    """Add --step, the number of a snapshot."""
    parser.add_argument(
        *("--step", "--from-step"),
        type=int,
        dest="from_step",
        metavar="N",
        help="take the snapshot of step N (store.keep), and let a run that trains go on",
    )


def load(given: Arguments) -> Config:
    """Return the config of the arguments; raises ConfigError."""
    return load_config(expand_argument(given.config), given.overrides)


def check_run(run: Path) -> Path:
    """Return a run directory that is there; raises ConfigError."""
    run_dir = expand_argument(run)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run directory; give the run.dir of a config")
    from swaptrain.ranks.limits import check_resharded
    from swaptrain.ranks.own_disk import check_rank_links
    from swaptrain.store.access.containment import check_contained
    from swaptrain.store.paths import rank_dirs

    check_rank_links(run_dir)
    check_resharded(run_dir)
    # Of several ranks each directory is a run's.
    for directory in rank_dirs(run_dir) or [run_dir]:
        check_contained(directory)
    return run_dir


@contextmanager
def whole_run(run_dir: Path) -> Iterator[Path]:
    """Yield a run directory that has all of a run's tensors: of several ranks one of links.

    Raises ConfigError for the directory of one rank and where ranks are missing, RunError while
    they train.
    """
    from swaptrain.ranks.layout import joined
    from swaptrain.ranks.limits import refuse_part

    refuse_part(run_dir)
    with joined(run_dir, say) as there:
        yield there


def say(message: str) -> None:
    """Write a line to the standard error."""
    # A standard error that fails (a log on a full disk) must not change the exit code.
    try:
        print(f"swaptrain: {message}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def say_first(message: str) -> None:
    """Write the first line of a run to the standard output, before anything heavy is imported."""
    with suppress(OSError):  # the run goes on without it, and says so with its next line
        print(message, flush=True)
