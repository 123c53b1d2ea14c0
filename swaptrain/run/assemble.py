"""Puts together what trains: memory, tier, commits, executor and steps, each one complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import torch

from swaptrain.compute.device import ComputeDevice
from swaptrain.config.schema import Config
from swaptrain.data import Batches
from swaptrain.durable.activations import Activations
from swaptrain.durable.commits import Commits
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.durable.tree_commits import Trees
from swaptrain.memory.malloc import release, retain, set_apart
from swaptrain.memory.slab import SlabPool
from swaptrain.memory.tier import Tier
from swaptrain.observe.memory_record import MemoryRecord
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.observe.metrics import MetricsFile, figures, read_rows, written_bytes
from swaptrain.observe.progress import Progress
from swaptrain.observe.reports import open_reports
from swaptrain.observe.starts import record_start
from swaptrain.observe.trace import TraceFile
from swaptrain.planning.budgets.disk_budget import keeping
from swaptrain.planning.planner import Plan
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.ram_budget import useful_bytes
from swaptrain.planning.start_line import start_line
from swaptrain.planning.step_cost import Price
from swaptrain.program.instructions import Instruction
from swaptrain.ranks.group import Group
from swaptrain.ranks.together import Together
from swaptrain.run.memory_guard import BudgetGuard, HeapGrowth, OwnBytes, UnusedBlocks
from swaptrain.run.open_data import loss_weights
from swaptrain.run.resume import ResumePoint, find_resume_point
from swaptrain.run.signals import StopRequest
from swaptrain.run.steps.boundary import Boundary
from swaptrain.run.steps.evaluation import Evaluation
from swaptrain.run.steps.executor import Executor
from swaptrain.run.steps.training import OptimizerChange, Training
from swaptrain.run.watch import Watch
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.export_request import ExportDoor
from swaptrain.store.slots.commit import Committer
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import Snapshots
from swaptrain.units import format_duration, format_size, how_many

__all__ = ["Parts", "assemble"]


@dataclass(frozen=True)
class Parts:
    """The store of a run and its data, open; and the forecast of its steps."""

    root: RootRecord
    slots: Slots
    backing: DiskBacking
    io: DirectIO
    data: Batches
    evaluation: Evaluation | None
    change: OptimizerChange | None
    floor_s: Callable[[int, int, float, float], float | None]
    """As `Training` has it."""
    evaluates: bool
    """Whether nothing is trained."""
    expected: Price
    """Of a step, as forecast."""
    group: Group | None = None
    """All ranks of the run; None where there is one process."""


def assemble(
    config: Config,
    prepared: Prepared,
    parts: Parts,
    resources: ExitStack,
    progress: Progress,
    stop: StopRequest,
    observe: Callable[[int, Instruction], None],
) -> Training:
    """Take the memory, find the position, and return what trains from there.

    `resources` gets what has to be closed: first the threads that write, then the files, then
    memory.
    """
    plan, paths, note = _measured_plan(prepared), RunPaths(config.run.dir), progress.note
    slots, backing = parts.slots, parts.backing
    pool, tier = _memory(plan, parts, prepared.device, resources)
    # Files are closed after the threads that write to them, whenever they were opened.
    files = resources.enter_context(ExitStack())
    values = None
    if not config.store.commit.is_whole:
        values = Activations(backing, tier, parts.io)
        resources.callback(values.close)
    committer = Committer(parts.io, slots)
    resources.callback(committer.close)
    backing.barrier = committer.drain
    fingerprint = plan.captured.model.fingerprint
    commits = Commits(plan.layouts, backing, tier, committer, fingerprint=fingerprint)
    position = find_resume_point(plan.layouts, slots, backing, parts.root)
    together = _together(plan, parts.group, position)
    metrics = MetricsFile(paths.metrics)
    files.callback(metrics.close)
    metrics.reserve(max(0, config.train.last_step - position.decision.done))
    reports = open_reports(config, note)
    files.callback(reports.close)
    if not parts.evaluates:
        if prepared.weighting.matters:
            note(str(prepared.weighting))
        note(_summary(config, plan, parts))
        device = prepared.device.device
        line = start_line(config, plan, parts.expected, device, position.decision.step)
        record_start(paths.starts, line, note)
    segments = len(plan.captured.model.segments)
    step = position.decision.step
    if parts.evaluates:
        step = position.decision.done
        progress.start_evaluation(step, segments)
    else:
        before = [row for row in read_rows(paths.metrics) if row["step"] < step]
        progress.start(
            config.train.last_step,
            step,
            segments,
            written_bytes=written_bytes(before),
            losses=figures(before, "loss"),
            counted="tok" if parts.data.counts_tokens else "items",
        )
    trace = None
    if config.run.trace:
        note(f"writing what the next steps do when to {paths.trace} (run.trace)")
        trace = TraceFile(paths.trace, config.run.trace, note)
        files.callback(trace.close)
    boundary = Boundary(
        stop,
        ExportDoor(config.run.dir, note) if together is None else None,
        step,
        largest=None if together is None else together.group.largest,
    )
    memory = None
    if config.run.memory and not parts.evaluates:
        note(f"writing what holds memory in each step to {paths.memory} (run.memory)")
        memory = _memory_record(config, prepared.device, plan, pool, parts.io, note)
        files.callback(memory.close)
    unused = None if memory is None else UnusedBlocks(prepared.device, plan, pool, note)
    watch = Watch(stop, progress, segments, boundary, trace, memory, unused)
    executor = Executor(
        tier,
        plan.operations,
        commits,
        _guard(config, plan, pool),
        values=values,
        lag=plan.lag,
        together=together,
        begin=watch.begin,
        tick=watch.tick,
        observe=observe,
        weigh=watch.weigh,
    )
    return Training(
        config=config,
        plan=plan,
        data=parts.data,
        weights=loss_weights(config, prepared, parts.data, note),
        evaluation=parts.evaluation,
        executor=executor,
        commits=commits,
        slots=slots,
        tier=tier,
        pool=pool,
        io=parts.io,
        metrics=metrics,
        reports=reports,
        position=position,
        trees=_trees(config, plan, parts, commits, together),
        boundary=boundary,
        values=values,
        note=note,
        report=watch.step_done,
        floor_s=parts.floor_s,
        change=parts.change,
        snapshots=_snapshots(config, plan, parts),
        together=together,
    )


def _together(plan: Plan, group: Group | None, position: ResumePoint) -> Together | None:
    """Return the other ranks, with all that any of them knows of the step that is done."""
    if group is None:
        return None
    together = Together(group, list(plan.captured.model.parameters))
    together.merge_norms(position.finished)
    return together


def _memory(
    plan: Plan, parts: Parts, device: ComputeDevice, resources: ExitStack
) -> tuple[SlabPool, Tier]:
    """Take the pool of slabs, and put the tier over it."""
    pool = device.pool(plan.pool_bytes, useful_bytes=useful_bytes(plan))
    tier = Tier(pool, parts.backing, let_go=device.synchronize)
    resources.callback(_close_memory, device, tier, pool)
    # Again, and before memory is given back: reads and writes that are under way use its slabs.
    resources.callback(parts.io.close)
    return pool, tier


def _close_memory(device: ComputeDevice, tier: Tier, pool: SlabPool) -> None:
    with suppress(torch.AcceleratorError):  # a device that failed has nothing under way
        device.synchronize()
    tier.close()
    pool.trim()


def _guard(config: Config, plan: Plan, pool: SlabPool) -> BudgetGuard:
    return BudgetGuard(
        pool,
        base_bytes=plan.base_bytes,
        host_bytes=config.memory.host,
        least_bytes=plan.peaks.instruction_bytes,
        own_bytes=OwnBytes(plan.captured, plan.measured),
        heap_growth=HeapGrowth(plan.captured, plan.measured),
    )


def _memory_record(
    config: Config,
    device: ComputeDevice,
    plan: Plan,
    pool: SlabPool,
    io: DirectIO,
    note: Callable[[str], None],
) -> MemoryRecord:
    return MemoryRecord(
        RunPaths(config.run.dir).memory,
        pool,
        staging_bytes=lambda: io.staging_bytes,
        allocator_bytes=device.allocator_bytes,
        budget_bytes=config.memory.host,
        base_bytes=plan.base_bytes,
        note=note,
    )


def _trees(
    config: Config, plan: Plan, parts: Parts, commits: Commits, together: Together | None
) -> Trees | None:
    """Return what commits the store as a whole; None where each segment is committed by itself."""
    if not config.store.commit.is_whole or parts.evaluates:
        return None
    keep = config.store.keep
    options = {} if together is None else {"together": together.commit.switch}
    return Trees(
        plan.layouts,
        parts.slots,
        parts.backing,
        commits,
        parts.root,
        last_step=config.train.last_step,
        keep_every=keep.every if keep is not None else None,
        **options,
    )


def _snapshots(config: Config, plan: Plan, parts: Parts) -> Snapshots | None:
    keep, segments = config.store.keep, list(plan.layouts.state)
    if keep is None:
        return None
    return Snapshots(parts.slots, segments, keeping=keeping(keep), root=parts.root)


def _measured_plan(prepared: Prepared) -> Plan:
    """Return the plan with the base as it is now: what creation took is no part of the arena.

    From here on the allocator keeps what it has.
    """
    release()
    retain()
    plan = replace(prepared.plan, base_bytes=resident_bytes())
    set_apart(plan.saved_tensors)
    return plan


def _summary(config: Config, plan: Plan, parts: Parts) -> str:
    model = plan.captured.model
    reserved = parts.backing.files.saved_bytes(plan.builder.saves)
    saved = f" ({format_size(reserved)} of disk are reserved for it)" if reserved else ""
    expected_s, traffic = parts.expected.step_s, parts.expected.traffic
    step = "" if expected_s is None else f", about {format_duration(expected_s)}"
    if step and traffic is not None:
        step += f" and {format_size(traffic.write_bytes)} written"
    step += " a step" if step else ""
    return (
        f"{how_many(model.parameter_count, 'parameter')} in "
        f"{how_many(len(model.segments), 'segment')}, of which "
        f"{len(plan.builder.saves)} save what the others recompute{saved}{step}; "
        f"base {format_size(plan.base_bytes)}, memory.host "
        f"{format_size(config.memory.host)}: {format_size(plan.pool_bytes)} of slabs, "
        f"{format_size(plan.arena_bytes)} for computing"
    )
