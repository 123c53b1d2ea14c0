"""The verb that compares a job with plain PyTorch, and its arguments."""

from __future__ import annotations

import argparse

from swaptrain.commands.arguments import Arguments, config_arguments, load, say
from swaptrain.errors import ConfigError
from swaptrain.machine.torch_settings import set_up_torch

__all__ = ["compare", "compare_arguments"]


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
