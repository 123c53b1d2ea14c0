"""What a config takes: segments, memory, disk, bytes and seconds per step; nothing is written."""

from __future__ import annotations

from swaptrain.config.resume_rules import check_resume
from swaptrain.config.schema import Config
from swaptrain.data import describe_rows
from swaptrain.data.record import RunRecord
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.machine.speeds import Machine, known_machine
from swaptrain.observe.metrics import read_rows, written_bytes
from swaptrain.planning.disk_budget import (
    disk_needs,
    estimated_data_bytes,
    occupied_bytes,
    spare_bytes,
)
from swaptrain.planning.forecast import forecast
from swaptrain.planning.planner import Plan
from swaptrain.planning.prepare import Prepared, recorded_config
from swaptrain.planning.step_bytes import boundary_bytes, state_bytes
from swaptrain.planning.step_cost import price
from swaptrain.program.cost import (
    StateBytes,
    break_even_tokens,
    least_traffic_bytes,
)
from swaptrain.run.idle_rates import check_rates, steps_done
from swaptrain.run.run_names import check_own
from swaptrain.store.access.containment import check_contained
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import free_bytes, read_root
from swaptrain.store.paths import RunPaths
from swaptrain.units import format_count, format_size
from swaptrain.verbs.inspection.report import last_rows
from swaptrain.verbs.plans.report import PlanReport, Segment
from swaptrain.verbs.plans.table import show

__all__ = ["PlanReport", "plan", "print_plan"]

_LAST_STEPS = 20


def plan(config: Config) -> PlanReport:
    """Prepare a run as training does, price its step, and write nothing.

    For a run that exists the recorded cut is taken. Raises ConfigError for what training refuses,
    except for a disk that is too full, which the report shows.
    """
    run_dir = config.run.dir
    check_own(run_dir)
    check_contained(run_dir)
    recorded = recorded_config(run_dir)
    root = read_root(run_dir)
    if recorded is not None:
        record = RunRecord(RunPaths(run_dir).train_data, refuse=False)
        config = config.with_steps_of(record.items) if record.items else config
        config = check_resume(recorded, config, accept_change=True)
    idle = check_rates(config, steps_done(run_dir, root))
    prepared = Prepared(config.resolved(), root, lambda _: None, draw=False)
    config, made = prepared.config, prepared.plan
    found = known_machine((config.store.paths or (run_dir,))[0], prepared.device.device)
    with DirectIO(1) as io:
        backing = DiskBacking(
            run_dir,
            made.layouts,
            io,
            micro_batches=config.data.micro_batches,
            deferred=made.builder.deferred,
        )
        needs = disk_needs(config, made, backing, data_bytes=estimated_data_bytes(config))
        spare = spare_bytes(needs, run_dir)
        timed = found if len(config.store.paths or ()) <= 1 else None  # as a run does it
        chosen = forecast(made, config, prepared.device, timed, disk_bytes=spare)
        made = chosen.plan
        needs = disk_needs(config, made, backing, data_bytes=estimated_data_bytes(config))
    state, crossing_bytes = state_bytes(made), boundary_bytes(made)
    commit_every = config.store.commit.every
    in_segments = not config.store.commit.is_whole
    priced = chosen.price if timed is found else price(made, config, found)
    traffic = priced.traffic
    least = least_traffic_bytes(
        state,
        crossing_bytes,
        made.pool_bytes,
        commit_every=commit_every,
        in_segments=in_segments,
    )
    written = (state.weights + state.rest) // commit_every + state.gradients
    written += 2 * crossing_bytes * in_segments
    if traffic is not None:
        written = traffic.write_bytes
    read_bytes = max(0, round(least) - written) if traffic is None else traffic.read_bytes
    return PlanReport(
        description=prepared.factory.description,
        parameters=made.captured.model.parameter_count,
        trained=prepared.built.trained.line(),
        rows=describe_rows(
            config.data, run_dir=run_dir, model_vocabulary=prepared.factory.vocabulary
        ),
        quantized=_quantized(made),
        segments=_segments(made),
        resumes=root is not None,
        host_bytes=config.memory.host,
        base_bytes=made.base_bytes,
        pool_bytes=made.pool_bytes,
        arena_bytes=made.arena_bytes,
        instruction_bytes=made.peaks.instruction_bytes,
        largest=made.peaks.largest,
        live_bytes=made.peaks.live_bytes,
        least_host=prepared.planner.least_host(),
        disk=tuple(needs),
        free_disk_bytes=tuple(free_bytes(need.path) for need in needs),
        occupied_disk_bytes=occupied_bytes(run_dir),
        traffic=traffic,
        least_traffic_bytes=least,
        step_write_bytes=written,
        written_bytes=written_bytes(read_rows(RunPaths(run_dir).metrics)),
        steps_left=max(0, (config.train.steps or 0) - steps_done(run_dir, root)),
        tokens=_tokens(config),
        machine=found,
        saves=len(made.builder.saves),
        io_s=None if found is None else found.disk.seconds(read_bytes, written),
        compute_s=priced.compute_s,
        step_s=priced.step_s,
        lag=made.lag,
        data_share=_data_share(RunPaths(run_dir)),
        idle_steps=idle,
        break_even_tokens=_break_even(config, made, found, state),
        weighting=str(prepared.weighting) if prepared.weighting.matters else None,
    )


def print_plan(config: Config) -> None:
    """Show the plan of a config on standard output."""
    show(plan(config), config)


def _segments(made: Plan) -> tuple[Segment, ...]:
    model, layouts = made.captured.model, made.layouts
    rows = []
    for segment in model.segments:
        k = segment.index
        held = [holder[k].nbytes for holder in (layouts.state, layouts.frozen) if k in holder]
        count = sum(model.parameters[name].tensor.numel for name in segment.owns)
        rows.append(Segment(k, segment.unit, count, sum(held), segment.isomorphism))
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


def _tokens(config: Config) -> int:
    per_item = config.data.sequence_length if config.data.python is None else 1
    return config.data.micro_batch * config.data.micro_batches * per_item


def _break_even(
    config: Config, made: Plan, found: Machine | None, state: StateBytes
) -> float | None:
    flops_per_s = found.flops_per_s.get(config.model.dtype) if found is not None else None
    if found is None or flops_per_s is None:
        return None
    return break_even_tokens(state, _flops_per_token(made), flops_per_s, found.disk)


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
