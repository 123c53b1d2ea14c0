"""The verbs that look at a config or a run and change nothing: plan, inspect, verify."""

from __future__ import annotations

import argparse

from swaptrain.commands.arguments import (
    Arguments,
    check_run,
    load,
    run_arguments,
)
from swaptrain.machine.torch_settings import set_up_torch

__all__ = ["inspect", "plan", "verify", "verify_arguments"]


def plan(given: Arguments) -> None:
    """Show segments, memory, disk and bytes per step of a config, and train nothing."""
    loaded = load(given)
    set_up_torch()
    from swaptrain.verbs.plan import print_plan

    print_plan(loaded)


def inspect(given: Arguments) -> None:
    """Show what a run directory holds: config, steps, segments, bytes."""
    run_dir = check_run(given.run)
    from swaptrain.verbs.inspect import inspect_run

    inspect_run(run_dir)


def verify(given: Arguments) -> None:
    """Read all that a run would go on from, and its snapshots, and list what is damaged.

    Every chunk is compared with its checksum, at the speed of the disk. Exit code 0 if nothing is
    wrong, else 3. A run that is training can be checked: it is not disturbed. --repair is refused
    while it trains.
    """
    run_dir = check_run(given.run)
    from swaptrain.verbs.verify import verify_run

    verify_run(run_dir, mend=given.repair)


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument(
        "--repair", action="store_true", help="restore what a snapshot holds the same bytes of"
    )
