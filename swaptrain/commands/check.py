"""The verbs that try things out: compare a job with plain PyTorch, and doctor, and arguments."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from swaptrain.commands.arguments import Arguments, config_arguments, load, say
from swaptrain.config.load import load_config
from swaptrain.config.paths import expand_argument
from swaptrain.errors import ConfigError
from swaptrain.machine.torch_settings import set_up_torch

__all__ = ["compare", "compare_arguments", "doctor", "doctor_arguments"]


def compare(given: Arguments) -> None:
    """Take the first steps of a job in plain PyTorch and in swaptrain, and compare the bits.

    Losses, gradient norms, held-out losses, final weights. Both run in a temporary directory beside
    run.dir, which is deleted; a run in run.dir is left alone. The model has to fit in memory; what
    differs by design (dropout, a GPU, train.skip_ignored) is refused. Exit code 0 where all bits
    are equal, 1 where they differ, 2 where they cannot be compared.

    python -m swaptrain compare --config mine.yaml
    python -m swaptrain compare --config mine.yaml --steps 5 device=cpu
    """
    if given.steps < 1:
        raise ConfigError(f"--steps is {given.steps}: give 1 or more")
    loaded = load(given)
    set_up_torch()
    from swaptrain.verbs.compare import print_comparison

    print_comparison(loaded, given.steps, say)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    config_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="steps to take (default 2)"
    )


def doctor(given: Arguments) -> None:
    """Check this machine for a run: disk, memory, processor, device, versions, environment.

    Each check says ok, note or problem, what was found, and what to do. With --config for the
    directories, budgets and extras of that job, else for a run in DIRECTORY (default: the current
    one). The disk is measured, six seconds, the first time. Exit code 0, or 1 where a problem would
    stop a run.

    python -m swaptrain doctor
    python -m swaptrain doctor /data/runs
    python -m swaptrain doctor --config mine.yaml --json
    """
    if given.config is not None and given.directory is not None:
        raise ConfigError("give one of --config FILE and DIRECTORY")
    config = None if given.config is None else load_config(expand_argument(given.config))
    directory = expand_argument(given.directory or Path())
    say("looking at the machine, some ten seconds")
    environment = dict(os.environ)  # before the settings for torch
    set_up_torch()
    from swaptrain.verbs.doctor import print_checks

    print_checks(config, directory, environment, as_json=given.json, note=say)


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIRECTORY", help="where a run would lie"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the config of a job")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
