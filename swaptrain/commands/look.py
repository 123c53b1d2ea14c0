"""The verbs that look at a config or a run: plan, inspect, report, verify."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from swaptrain.commands.arguments import (
    Arguments,
    check_run,
    config_arguments,
    load,
    run_arguments,
    say,
    step_argument,
    whole_run,
)
from swaptrain.config.paths import expand_argument
from swaptrain.errors import ConfigError
from swaptrain.machine.torch_settings import set_up_torch
from swaptrain.units import how_many

__all__ = ["inspect", "inspect_arguments", "plan", "plan_arguments", "verify"]
__all__ += ["report", "report_arguments", "verify_arguments"]


def plan(given: Arguments) -> None:
    """Show segments, memory, disk and bytes per step of a config, and train nothing.

    Also when the run would end, what bounds it, and what would help most.

    Examples:
      swaptrain plan --config job.yaml
      swaptrain plan --config job.yaml memory.host=16GiB --suggest
      swaptrain plan --config job.yaml --what-if "disk 7GB/s read, 5GB/s write; 100 TFLOPS;
        pcie 25GB/s; ram 64GiB"
      swaptrain plan --config job.yaml --ranks 2 4 8 --what-if "link 10Gb/s"
    """
    if not 0 < given.tbw < float("inf"):
        raise ConfigError(f"--tbw is {given.tbw:g}: give the terabytes that a drive may take")
    ranks = [word for word in given.ranks if "=" not in word]
    given.overrides += [word for word in given.ranks if "=" in word]  # which came after them
    if wrong := [word for word in ranks if not word.isdecimal()]:
        raise ConfigError(f"--ranks {wrong[0]}: give how many processes would train, such as 2 4 8")
    loaded = load(given)
    say(f"{given.config} is read: loading torch, and then the model")
    set_up_torch()
    from swaptrain.verbs.plan import print_plan
    from swaptrain.verbs.plans.questions import Questions

    asked = Questions(
        suggest=given.suggest,
        layers=given.layers,
        what_if=given.what_if,
        ranks=[int(word) for word in ranks],
        drive_bytes=given.tbw * 1e12,
        as_json=given.json,
    )
    print_plan(loaded, asked, say)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    config_arguments(parser)
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="try other budgets, batches, dtypes of state and adapters, and compare them",
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="MACHINE",
        help="price a step on another machine, of which only what differs is said; repeatable",
    )
    parser.add_argument(
        "--ranks",
        action="extend",
        nargs="+",
        default=[],
        metavar="N",
        help="price a run of N processes (torchrun), each on a machine of its own, too",
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="show the layers, the largest first, and what could be better in them",
    )
    parser.add_argument(
        "--tbw",
        type=float,
        default=600.0,
        metavar="TB",
        help="terabytes that the drive is guaranteed to take (default 600)",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def inspect(given: Arguments) -> None:
    """Show what a run directory holds: config, steps, segments, bytes; or one tensor; or two runs.

    With NAME: where that tensor lies, its figures, a histogram, its optimizer state and its float32
    master; of a glob a table. With a second RUN: the config keys and the tensors that differ. Both
    read the last step; of a run that trains, the end of the step in progress, where it waits.

    With --memory: what held memory at each instruction of the last step, where run.memory is true.

    python -m swaptrain inspect runs/mine
    python -m swaptrain inspect runs/mine model.embed_tokens.weight
    python -m swaptrain inspect runs/mine '*.mlp.*' --step 100
    python -m swaptrain inspect runs/mine runs/other
    """
    run_dir = check_run(given.run)
    if given.order is not None and not given.memory:
        raise ConfigError("--order is of the table that --memory shows: give both")
    if given.memory:
        from swaptrain.verbs.inspection.memory_table import read_memory, show_memory

        show_memory(read_memory(_one_of(run_dir)), given.order or "size")
        return
    if given.what is None:
        if given.from_step is not None or given.json:
            raise ConfigError("--step and --json belong to a tensor or a second run: name it")
        _inspect(run_dir)
        return
    set_up_torch()  # which decodes state of 8 bits
    from swaptrain.verbs.inspection.difference import inspect_difference, is_run
    from swaptrain.verbs.inspection.tensor import inspect_tensors

    step, as_json = given.from_step, given.json
    with whole_run(run_dir) as there:
        if is_run(other := expand_argument(Path(given.what))):
            same = other.resolve() == run_dir.resolve()
            with nullcontext(there) if same else whole_run(check_run(other)) as second:
                inspect_difference(there, second, from_step=step, as_json=as_json, note=say)
        else:
            inspect_tensors(there, given.what, from_step=step, as_json=as_json, note=say)


def _one_of(run_dir: Path) -> Path:
    """Return the directory whose rows are shown: of several ranks that of the first, said so."""
    from swaptrain.store.paths import rank_dirs

    directories = rank_dirs(run_dir)
    if not directories:
        return run_dir
    say(
        f"{run_dir} holds a run of {how_many(len(directories), 'rank')}: this is the part of rank 0"
    )
    return directories[0]


def _inspect(run_dir: Path) -> None:
    """Show a run; one of several ranks as one."""
    from swaptrain.store.access.lock import lock_owner
    from swaptrain.store.paths import rank_dirs
    from swaptrain.verbs.inspect import inspect_run

    directories = rank_dirs(run_dir)
    if not directories:
        inspect_run(run_dir)
        return
    from swaptrain.ranks.layout import joined  # which imports torch

    if any(map(lock_owner, directories)):
        inspect_run(_one_of(run_dir))
    else:
        with joined(run_dir, say) as there:
            inspect_run(there, named=run_dir)


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `inspect`."""
    run_arguments(parser)
    parser.add_argument(
        "what", nargs="?", metavar="NAME|RUN", help="a tensor's name or a glob, or a second run"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    step_argument(parser)
    parser.add_argument(
        "--memory", action="store_true", help="show what held memory during the last step"
    )
    parser.add_argument(
        "--order",
        choices=("size", "program"),
        help="of --memory: the largest instruction first (the default), or as they ran",
    )


def report(given: Arguments) -> None:
    """Write one HTML page of a run: charts of its steps, and what ran where.

    The page needs nothing else, also no network. A run that is training is not disturbed. With
    RUN_B the keys that differ come first, and charts have the curves of both. Of a run of several
    ranks the charts are of rank 0; bytes and seconds of the others are in a table.

      python -m swaptrain report runs/mine                       # writes runs/mine/report.html
      python -m swaptrain report runs/mine runs/other --to both.html

    The path of the page is printed. See docs/report.md.
    """
    runs = [check_run(run) for run in (given.run, given.other) if run is not None]
    from swaptrain.verbs.report import write_report

    to = None if given.to is None else expand_argument(given.to)
    print(write_report(runs, to, say))


def report_arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument(
        "other", type=Path, nargs="?", metavar="RUN_B", help="a second run, to be compared with it"
    )
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="the page to write (default RUN/report.html)"
    )


def verify(given: Arguments) -> None:
    """Read all that a run would go on from, and its snapshots, and list what is damaged.

    Every chunk is compared with its checksum, at the speed of the disk. Exit code 0 if nothing is
    wrong, else 3. A run that is training can be checked: it is not disturbed. --repair is refused
    while it trains. A run of several ranks is checked between two trainings, each of its ranks.
    """
    run_dir = check_run(given.run)
    from swaptrain.store.paths import rank_dirs

    if rank_dirs(run_dir):
        from swaptrain.verbs.verify_ranks import verify_ranks  # which imports torch

        verify_ranks(run_dir, mend=given.repair)
        return
    from swaptrain.verbs.verify import verify_run

    verify_run(run_dir, mend=given.repair)


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument(
        "--repair", action="store_true", help="restore what a snapshot holds the same bytes of"
    )
