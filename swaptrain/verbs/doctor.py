"""The verb `doctor`: whether this machine is fit for a run, and what to do where it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from swaptrain.config.schema import Config
from swaptrain.errors import RunError
from swaptrain.store.disk.durable_files import existing_parent
from swaptrain.units import how_many
from swaptrain.verbs.checkup.disk import check_disk
from swaptrain.verbs.checkup.memory import check_memory_limits
from swaptrain.verbs.checkup.packages import check_packages
from swaptrain.verbs.checkup.processor import check_device, check_processor
from swaptrain.verbs.checkup.result import CheckResult, Verdict
from swaptrain.verbs.checkup.surroundings import check_clock, check_environment
from swaptrain.verbs.inspection.tensor_table import open_console

__all__ = ["check_machine", "print_checks"]

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


def check_machine(
    config: Config | None,
    directory: Path,
    environment: Mapping[str, str],
    note: Callable[[str], None] = lambda _: None,
) -> list[CheckResult]:
    """Return all checks, for a run in `directory`, or for that of a config and its `store.paths`.

    `environment` holds the variables as they were when the command began. Takes about ten seconds
    where the disk was never measured, else three. Nothing is left on the disk.
    """
    places = [directory]
    if config is not None:
        places = [config.run.dir, *(config.store.paths or ())]
    found: list[CheckResult] = []
    seen: set[int] = set()
    for place in places:
        device = _device(place)
        if device not in seen:  # two directories on one disk
            found += check_disk(place, note)
        seen.add(device)
    found += check_memory_limits(config)
    found += check_processor(config)
    found += check_device(config)
    found += check_packages(config)
    found += check_environment(environment, len(os.sched_getaffinity(0)))
    found += check_clock()
    areas = [one.area for one in found if one.area != "clock"] + ["clock"]
    return sorted(found, key=lambda one: areas.index(one.area))


def print_checks(
    config: Config | None,
    directory: Path,
    environment: Mapping[str, str],
    *,
    as_json: bool,
    note: Callable[[str], None],
) -> None:
    """Print all checks; raises RunError where something would stop a run."""
    found = check_machine(config, directory, environment, note)
    problems = [result for result in found if result.verdict is Verdict.PROBLEM]
    if as_json:
        print(json.dumps({"problems": len(problems), "checks": [asdict(one) for one in found]}))
    else:
        _show(found)
    if problems:
        names = ", ".join(f"{one.area}: {one.name}" for one in problems)
        raise RunError(f"{how_many(len(problems), 'problem')} would stop a run: {names}")


def _show(found: list[CheckResult]) -> None:
    console = open_console()
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    area = ""
    for one in found:
        style = _STYLES[one.verdict]
        shown = "" if one.area == area else one.area
        area = one.area
        table.add_row(shown, Text(one.name), Text(one.verdict, style=style), Text(one.found))
        if one.advice:
            table.add_row("", "", "", Text(f"-> {one.advice}"))
    console.print(table, highlight=False)
    notes = sum(one.verdict is Verdict.NOTE for one in found)
    problems = sum(one.verdict is Verdict.PROBLEM for one in found)
    counts = f"{how_many(problems, 'problem')}, {how_many(notes, 'note')}"
    console.print(Text(f"{how_many(len(found), 'check')}: {counts}"))


def _device(path: Path) -> int:
    return existing_parent(path).stat().st_dev
