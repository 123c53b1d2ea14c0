"""From a locked run directory to what trains in it: everything that a start reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from swaptrain.config.optimizer import OptimizerConfig
from swaptrain.config.schema import Config
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.durable.spill_files import SpillFiles
from swaptrain.errors import RunError
from swaptrain.machine.speeds import Machine
from swaptrain.memory.malloc import release
from swaptrain.observe.progress import Progress
from swaptrain.planning.budgets.disk_budget import (
    DiskNeed,
    DiskUse,
    check_disk,
    disk_needs,
    disk_uses,
    estimated_data_bytes,
    scratch_bytes,
)
from swaptrain.planning.forecast import Forecast, forecast
from swaptrain.planning.planner import Plan
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.roofline import disk_machine, step_floor
from swaptrain.planning.tier_overhead import with_load_cost
from swaptrain.planning.update_rules import update_rules
from swaptrain.program.instructions import Instruction
from swaptrain.ranks.agreement import in_all
from swaptrain.ranks.commit import JointCommit
from swaptrain.ranks.exchange import Exchange
from swaptrain.ranks.group import Group
from swaptrain.run.assemble import Parts, assemble
from swaptrain.run.go_back import go_back, verify_snapshot
from swaptrain.run.idle_rates import check_rates
from swaptrain.run.open_data import RunData
from swaptrain.run.open_store import look_at_store, open_store
from swaptrain.run.signals import StopRequest
from swaptrain.run.start_over import begun_otherwise, start_over
from swaptrain.run.steps.training import OptimizerChange, Training
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.format.origin import record_origin
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.snapshots import Snapshot
from swaptrain.units import format_size, how_many

__all__ = ["Start", "open_run"]


@dataclass(frozen=True)
class Start:
    """A start of a run, as the command and the run directory say it."""

    config: Config
    prepared: Prepared
    root: RootRecord | None
    """Record of the run that is resumed; None where a run begins."""
    fresh: bool
    before: OptimizerConfig | None
    """The optimizer that an existing run has been trained with."""
    back_to: Snapshot | None
    """The snapshot that the run goes back to first."""
    group: Group | None = None
    """All ranks of the run; None where there is one process."""
    evaluates: bool = False
    """Whether a step is only looked at: then nothing is reserved that training needs."""


def open_run(
    start: Start,
    resources: ExitStack,
    progress: Progress,
    stop: StopRequest,
    observe: Callable[[int, Instruction], None],
) -> Training:
    """Create the store or find the position in it; return what trains, complete.

    `resources` gets what has to be closed. Raises ConfigError before anything is written.
    """
    config, prepared, root, note = start.config, start.prepared, start.root, progress.note
    plan, run_dir = prepared.plan, config.run.dir
    resources.callback(release)
    io = DirectIO(on_fallback=note)
    resources.callback(io.close)
    backing = DiskBacking(
        run_dir,
        plan.layouts,
        io,
        micro_batches=plan.builder.micro_batches,
        deferred=plan.builder.deferred,
        verify=config.store.verify,
    )
    backing.files.clear_saved()
    scratch = 0
    if not start.evaluates:
        estimate = estimated_data_bytes(config) if root is None else 0
        needs = disk_needs(config, plan, backing, data_bytes=estimate)
        scratch = _scratch_bytes(start, needs, note)
    if start.back_to is not None:
        assert root is not None, "a snapshot is one of a run that exists"
        note(f"verifying the snapshot of step {start.back_to.step}")
        verify_snapshot(start.back_to, root, io, stop)
    found = RunData(config, prepared, start.group, fresh=start.fresh, note=note)
    data = found.batches()
    resources.callback(data.close)
    if start.group is not None:
        link = Exchange(start.group).speed()
        note(f"a rank gets {format_size(int(link))} a second of another one")
        plan = replace(plan, link_bytes_per_s=link)
    if config.train.epochs is not None:
        start, config = _with_steps(start, len(data), note)
    evaluation = found.evaluation(config, data)
    # Nothing but tokens was written up to here: what is wrong with the input has been said.
    found.keep()
    if start.back_to is not None and root is not None:
        root = go_back(run_dir, start.back_to, root, note)
    change = _begin_writing(start)
    machine = disk_machine(config, prepared.device.device, note)
    if machine is not None:
        plan = with_load_cost(plan, data)
    chosen = _chosen(plan, start, machine, backing.files, scratch, note)
    prepared.plan = chosen.plan
    backing.files.reserve_evaluated()
    if start.evaluates:
        assert root is not None, "a step is one of a run that exists"
        slots = look_at_store(config, prepared, backing)
    else:
        first = None if start.group is None else JointCommit(start.group).switch
        slots, root = open_store(
            config,
            prepared,
            root,
            backing,
            io,
            note=note,
            count=progress.count,
            stop=stop,
            together=first,
        )
    if not start.evaluates:
        prepared.planner.keep_measures(chosen.plan)
    parts = Parts(
        root=root,
        slots=slots,
        backing=backing,
        io=io,
        data=data,
        evaluation=evaluation,
        change=change,
        evaluates=start.evaluates,
        floor_s=step_floor(chosen.plan, machine),
        expected=chosen.price,
        group=start.group,
    )
    return assemble(config, prepared, parts, resources, progress, stop, observe)


def _scratch_bytes(start: Start, needs: list[DiskNeed], note: Callable[[str], None]) -> int:
    """Return the bytes that scratch may take of the disk of this rank.

    Raises ConfigError, in all ranks, where a disk lacks room for all that use it.
    """
    rank, group = start.prepared.plan.builder.ranks.rank, start.group
    uses = disk_uses(needs, start.config.run.dir, rank=rank)
    if group is None:
        check_disk(uses, note)
    else:
        said = group.gather([asdict(use) for use in uses])
        uses = [DiskUse(**use) for of_rank in said for use in of_rank]
        in_all(group, lambda: check_disk(uses, note))
    return scratch_bytes(uses, rank=rank)


def _with_steps(start: Start, items: int, note: Callable[[str], None]) -> tuple[Start, Config]:
    """Let epochs become steps, now that the number of items is known. Raises ConfigError."""
    epochs = start.config.train.epochs
    config = start.config.with_steps_of(items).resolved()
    whole = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    steps = how_many(config.train.last_step, "step")
    note(f"{whole} of {how_many(items, 'item')}: {steps}")
    if idle := check_rates(config, 0):
        note(idle)
    return replace(start, config=config), config


def _begin_writing(start: Start) -> OptimizerChange | None:
    """Clear what an earlier run left, where one begins, and record the origin and the config.

    Return the change of the optimizer, which is recorded once the interrupted step is done.
    """
    config, prepared, run_dir = start.config, start.prepared, start.config.run.dir
    fingerprint = prepared.plan.captured.model.fingerprint
    origin = prepared.built.initial.origin
    if start.fresh or (start.root is None and begun_otherwise(run_dir, fingerprint, origin)):
        start_over(run_dir)
    if start.root is None:
        record_origin(run_dir, origin)
    path, content = RunPaths(run_dir).config, config.resolved_yaml().encode()

    def record() -> None:
        # A run on a full disk can go on: what it writes is reserved, and this is there already.
        if not path.exists() or path.read_bytes() != content:
            write_aside(path, content)

    if start.before is not None and start.before != config.optimizer:
        module = prepared.built.initial.module
        rules = update_rules(start.before, config.train.seed, module)
        return OptimizerChange(start.before, rules, record)
    record()
    return None


def _chosen(
    plan: Plan,
    start: Start,
    machine: Machine | None,
    files: SpillFiles,
    disk_bytes: int,
    note: Callable[[str], None],
) -> Forecast:
    """Choose what makes steps shortest, and reserve room for what segments save."""
    config, device = start.config, start.prepared.device
    chosen = forecast(plan, config, device, machine, disk_bytes=disk_bytes)
    try:
        files.reserve_saved(chosen.plan.builder.saves)
    except RunError as error:  # a quota, which no free space shows
        note(f"the backward recomputes all that it needs: {error}")
        files.clear_saved()
        chosen = forecast(plan, config, device, machine, disk_bytes=0)
    if start.root is None and config.store.commit.is_whole:
        note(
            "a step's state is committed as a whole at its end, and nothing inside it: a killed "
            "run repeats its step (store.commit.unit: step)"
        )
    if config.store.commit.lag is None and chosen.plan.lag > 1:
        note(
            "on this disk steps are shorter where a killed run may repeat two segments' "
            "backwards instead of one, so it may (store.commit.lag)"
        )
    can, most = len(chosen.plan.builder.saves), len(plan.captured.model.segments) - 1
    if config.train.recompute is False and can < most:
        note(
            f"train.recompute is false, but only {can} of {how_many(most, 'segment')} can save "
            "what their backward needs: memory.host or the disk has no room for more"
        )
    return chosen
