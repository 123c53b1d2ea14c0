"""Writes a config for a model directory and files, with what a run of it will take."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from swaptrain.compute.device import open_device
from swaptrain.config.load import parse_config
from swaptrain.config.paths import cached_model
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.machine.speeds import machine
from swaptrain.start import (
    Choice,
    DataFacts,
    MachineFacts,
    Method,
    ModelFacts,
    check_new,
    chosen,
    look_at_data,
    look_at_machine,
    look_at_model,
    write_new,
)
from swaptrain.units import format_duration, format_size, how_many
from swaptrain.verbs.plan import plan
from swaptrain.verbs.plans.report import PlanReport
from swaptrain.verbs.plans.table import figures

__all__ = ["init"]

_FIGURES = ("trained", "memory.host", "disk", "a step moves", "wear", "a step takes")
"""Of a plan, what the comments say."""


def init(
    to: Path,
    model: Path,
    patterns: Sequence[str],
    *,
    template: Path | None,
    method: Method | None,
    note: Callable[[str], None],
) -> None:
    """Write the config `to`; `note` hears of what takes long.

    `patterns` are files or globs. Raises ConfigError for what cannot be used, and then nothing is
    written; BudgetError where the machine's memory is too small for one sequence.
    """
    check_new(to)
    directory = cached_model(str(model), weights=True)
    if not Path(directory).is_dir():
        raise ConfigError(f"--model {model}: it is no directory, and not in the hub's local cache")
    run_dir = Path("runs") / to.stem
    if os.path.lexists(run_dir):
        raise ConfigError(
            f"{run_dir} is there already, where the run of {to.name} would lie: give the config "
            "another name"
        )
    note(f"looking at {', '.join(patterns)}")
    data = look_at_data(
        patterns,
        Path(directory),
        template=None if template is None else str(template),
        processes=len(os.sched_getaffinity(0)),
    )
    facts = look_at_model(directory, data)
    here = look_at_machine(run_dir)
    note(f"{data.line()}. {facts.line()}")
    choice, config, report = _fitting(str(model), facts, data, here, run_dir, method, note)
    head = [
        *_head(facts, data, here),
        *_estimates(report, config, choice.steps),
        *_next(to, config),
    ]
    write_new(to, choice.config.text(head, ()))
    note(f"{to} is written: it says what it takes, and the command that begins")


def _fitting(
    model_dir: str,
    facts: ModelFacts,
    data: DataFacts,
    here: MachineFacts,
    run_dir: Path,
    method: Method | None,
    note: Callable[[str], None],
) -> tuple[Choice, Config, PlanReport]:
    """Return the config with the largest micro-batch that the memory allows, and its plan."""
    most: int | None = None
    while True:
        choice = chosen(model_dir, facts, data, here, run_dir, method=method, micro_batch=most)
        config = parse_config(choice.config.text((), ()), source="the config that was chosen")
        machine(here.disk, open_device(config.device, None).device, [config.model.dtype], note)
        note("planning")
        try:
            return choice, config, plan(config)
        except BudgetError:
            if config.data.micro_batch == 1:
                raise
            most = config.data.micro_batch // 2


def _head(facts: ModelFacts, data: DataFacts, here: MachineFacts) -> list[str]:
    return [
        "Written by swaptrain init, to be edited; docs/config.md explains every key.",
        "",
        f"  model: {facts.line()}",
        f"  data: {data.line()}",
        f"  machine: {here.line()}",
        "",
    ]


def _estimates(report: PlanReport, config: Config, steps: int) -> list[str]:
    found = [f"  {name}: {text}" for name, text in figures(report, config) if name in _FIGURES]
    if report.step_s is not None:
        found.append(
            f"  all of about {how_many(steps, 'step')}: {format_duration(steps * report.step_s)}"
        )
    if report.step_write_bytes:
        found.append(f"  written in all: {format_size(steps * report.step_write_bytes)}")
    return ["What plan says of it, by figures of a moment:", *found, ""]


def _next(to: Path, config: Config) -> list[str]:
    where, run_dir = shlex.quote(str(to)), shlex.quote(str(config.run.dir))
    merged = " --merged" if config.lora is not None else ""
    model_dir = shlex.quote(str(to.with_suffix("")) + "-model")
    return [
        f"    python -m swaptrain --config {where}",
        f"    python -m swaptrain export {run_dir}{merged} --to {model_dir}",
    ]
