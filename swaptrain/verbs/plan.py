"""What a config takes: segments, memory, disk, bytes and seconds per step; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from swaptrain.config.schema import Config
from swaptrain.data import describe_rows
from swaptrain.errors import ConfigError
from swaptrain.observe.metrics import read_rows, written_bytes
from swaptrain.planning.budgets.disk_budget import occupied_bytes
from swaptrain.planning.planner import Plan
from swaptrain.planning.step_bytes import state_bytes
from swaptrain.program.cost import break_even_tokens
from swaptrain.store.format.root import free_bytes
from swaptrain.store.paths import RunPaths
from swaptrain.units import format_count, format_size
from swaptrain.verbs.inspection.report import last_rows
from swaptrain.verbs.plans.bound import bound
from swaptrain.verbs.plans.layers_table import hints_of, layers_of, print_layers
from swaptrain.verbs.plans.planned import Planned, planned
from swaptrain.verbs.plans.questions import Questions
from swaptrain.verbs.plans.ranks import check_ranks_asked, print_ranks, rank_tables
from swaptrain.verbs.plans.report import PlanReport, Segment
from swaptrain.verbs.plans.suggest import print_choices, suggest
from swaptrain.verbs.plans.table import plan_console, show
from swaptrain.verbs.plans.what_if import OtherMachine, parse_machine, print_what_ifs, what_if

__all__ = ["PlanReport", "plan", "print_plan"]

_LAST_STEPS = 20


def plan(config: Config) -> PlanReport:
    """Prepare a run as training does, price its step, and write nothing.

    For a run that exists the recorded cut is taken. Raises ConfigError for what training refuses,
    except for a disk that is too full, which the report shows.
    """
    return _report(planned(config))


def print_plan(
    config: Config,
    asked: Questions | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Show the plan of a config on standard output; `note` hears what takes time.

    Raises ConfigError for what training refuses, and for machines that are not understood.
    """
    asked = asked or Questions()
    machines = [parse_machine(text) for text in asked.what_if]
    check_ranks_asked(config, asked.ranks)
    _check_links(machines, asked)
    found = planned(config, note)
    report = _report(found)
    others = [what_if(found, machine) for machine in _of_one_process(machines)]
    tables = rank_tables(found, asked.ranks, machines, note) if asked.ranks else []
    for table in tables[:1]:
        disks = tuple((row.ranks, row.disk_bytes) for row in table.rows[1:])
        report = replace(report, ranks_disk_bytes=disks)
    choices, refused = suggest(found, note) if asked.suggest else ([], [])
    if asked.as_json:
        tree: dict[str, Any] = {"plan": asdict(report)}
        if machines:
            tree["what_if"] = [asdict(other) for other in others]
        if tables:
            tree["ranks"] = [asdict(table) for table in tables]
        if asked.suggest:
            tree["suggestions"] = [asdict(choice) for choice in choices]
            tree["refused"] = [asdict(one) for one in refused]
        if asked.layers:
            rows = layers_of(found)
            tree["layers"] = [one.figures() for one in rows]
            tree["hints"] = [{"layer": name, "hint": text} for name, text in hints_of(found, rows)]
        print(json.dumps(tree, indent=1, default=_plain))
        return
    console = plan_console()
    if asked.layers:
        print_layers(found, console)
        console.print()
    show(report, config, drive_bytes=asked.drive_bytes, console=console)
    if others:
        console.print()
        print_what_ifs(found, others, console)
    if tables:
        console.print()
        print_ranks(found, tables, console)
    if asked.suggest:
        console.print()
        print_choices(choices, refused, console)


def _of_one_process(machines: Sequence[OtherMachine]) -> list[OtherMachine]:
    """Return those that differ by more than their network, which one process does not use."""
    apart: dict[OtherMachine, OtherMachine] = {}
    for machine in machines:
        if not machine.is_this_one:
            apart.setdefault(replace(machine, text="", network_bytes_per_s=None), machine)
    return list(apart.values())


def _check_links(machines: Sequence[OtherMachine], asked: Questions) -> None:
    """Raise ConfigError for a network where one process is planned, which has none."""
    for machine in machines:
        if machine.network_bytes_per_s is not None and not asked.ranks:
            raise ConfigError(
                f"--what-if {machine.text!r}: link is the network between ranks: say how many with "
                "--ranks N; that of a device is pcie"
            )


def _plain(value: Any) -> Any:
    """Return what JSON has no word for."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} in a plan")


def _report(found: Planned) -> PlanReport:
    config, prepared, made, price = found.config, found.prepared, found.made, found.price
    run_dir, model = config.run.dir, made.captured.model
    return PlanReport(
        description=prepared.factory.description,
        parameters=model.parameter_count,
        trained_parameters=sum(p.tensor.numel for p in model.parameters.values() if p.trainable),
        trained=prepared.built.trained.line(),
        rows=describe_rows(
            config.data, run_dir=run_dir, model_vocabulary=prepared.factory.vocabulary
        ),
        quantized=_quantized(made),
        segments=_segments(made),
        resumes=found.root is not None,
        host_bytes=config.memory.host,
        base_bytes=made.base_bytes,
        pool_bytes=made.pool_bytes,
        arena_bytes=made.arena_bytes,
        instruction_bytes=made.peaks.instruction_bytes,
        largest=made.peaks.largest,
        live_bytes=made.peaks.live_bytes,
        least_host=prepared.planner.least_host(),
        disk=found.needs,
        free_disk_bytes=tuple(free_bytes(need.path) for need in found.needs),
        occupied_disk_bytes=occupied_bytes(run_dir),
        traffic=price.traffic,
        least_traffic_bytes=found.least_bytes,
        step_write_bytes=found.write_bytes,
        written_bytes=written_bytes(read_rows(RunPaths(run_dir).metrics)),
        steps_left=found.steps_left,
        tokens=found.tokens,
        counted=found.counted,
        machine=found.machine,
        saves=len(made.builder.saves),
        io_s=found.io_s,
        compute_s=price.compute_s,
        step_s=price.step_s,
        lag=made.lag,
        data_share=_data_share(RunPaths(run_dir)),
        idle_steps=found.idle_steps,
        break_even_tokens=_break_even(found),
        weighting=str(prepared.weighting) if prepared.weighting.matters else None,
        bound=bound(found),
        experts=made.ranges.experts,
        embedding_rows=made.ranges.rows,
    )


def _segments(made: Plan) -> tuple[Segment, ...]:
    model, layouts = made.captured.model, made.layouts
    rows = []
    for segment in model.segments:
        k = segment.index
        held = [holder[k].nbytes for holder in (layouts.state, layouts.frozen) if k in holder]
        count = sum(model.parameters[name].tensor.numel for name in segment.owns)
        rows.append(Segment(k, segment.module, count, sum(held), segment.isomorphism))
    return tuple(rows)


def _data_share(paths: RunPaths) -> float | None:
    """Return how much of a run's last steps was waiting for data."""
    rows = last_rows(paths.metrics, _LAST_STEPS)
    seconds = sum(row.get("step_s", 0.0) for row in rows)
    return sum(row.get("data_wait_s", 0.0) for row in rows) / seconds if seconds > 0 else None


def _quantized(made: Plan) -> str | None:
    found = [p for p in made.captured.model.parameters.values() if p.quantized is not None]
    if not found:
        return None
    stored_bytes = sum(tensor.nbytes for p in found for tensor in p.stored)
    whole_bytes = sum(p.tensor.nbytes for p in found)
    count = sum(p.tensor.numel for p in found)
    return (
        f"{format_count(count)} parameters as {found[0].quantized}: {format_size(stored_bytes)} "
        f"instead of {format_size(whole_bytes)}"
    )


def _break_even(found: Planned) -> float | None:
    if found.machine is None:
        return None
    flops_per_s = found.machine.flops_per_s.get(found.config.model.dtype)
    if flops_per_s is None:
        return None
    flops = _flops_per_token(found.made)
    return break_even_tokens(state_bytes(found.made), flops, flops_per_s, found.machine.disk)


def _flops_per_token(made: Plan) -> int:
    """Return the flops a token: 2 a parameter in each pass, and 2 more for a gradient of weights.

    Forward, recomputation and gradients of values where something learns; else the forward alone.
    """
    model, flops = made.captured.model, 0
    for segment in model.segments:
        learns = made.builder.objects.learns(segment)
        for name in segment.owns:
            parameter = model.parameters[name]
            passes = 3 + parameter.trainable if learns else 1
            flops += 2 * passes * parameter.tensor.numel
    return flops
