"""A run directory that is open for writing, and everything that trains in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from swaptrain.compute.weighting.counts import LossWeights
from swaptrain.compute.weighting.held_out import HeldOutWeights
from swaptrain.config.schema import Config, DataConfig, OptimizerConfig
from swaptrain.data import Batches, open_data, open_eval
from swaptrain.durable.activations import KeptValues
from swaptrain.durable.commits import Commits
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.durable.tree_commits import Trees
from swaptrain.errors import ConfigError, RunError
from swaptrain.machine.speeds import Machine
from swaptrain.memory.malloc import release, retain, set_apart
from swaptrain.memory.tier import Tier
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.observe.metrics import MetricsFile
from swaptrain.observe.progress import Progress
from swaptrain.observe.trace import TraceFile
from swaptrain.plan.choose import choose_plan
from swaptrain.plan.disk_budget import check_disk, disk_needs, estimated_data_bytes, spare_bytes
from swaptrain.plan.planner import Plan
from swaptrain.plan.prepare import Prepared, update_rules
from swaptrain.plan.ram_budget import useful_bytes
from swaptrain.plan.roofline import disk_machine, step_floor
from swaptrain.plan.step_cost import price
from swaptrain.plan.tier_overhead import with_load_cost, with_tier_cost
from swaptrain.program.instructions import Instruction
from swaptrain.run.executor import Executor
from swaptrain.run.finish import separate_all
from swaptrain.run.go_back import go_back, verify_snapshot
from swaptrain.run.memory_guard import BudgetGuard, OwnBytes
from swaptrain.run.open_store import open_store
from swaptrain.run.resume import find_resume_point
from swaptrain.run.signals import StopRequest
from swaptrain.run.start_over import begun_otherwise, start_over
from swaptrain.run.step_boundary import Boundary
from swaptrain.run.steps import Evaluation, OptimizerChange, Training
from swaptrain.run.watch import Watch
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.format.origin import record_origin
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.export_request import ExportDoor
from swaptrain.store.slots.commit import Committer
from swaptrain.store.slots.snapshots import Snapshot, Snapshots
from swaptrain.units import format_duration, format_size

__all__ = ["OpenRun"]


class OpenRun:
    """Opens a run in two parts, the store and what trains on it; `close` ends whatever was opened.

    `root` is the record of the run that is resumed; None where a run begins.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        root: RootRecord | None,
        progress: Progress,
        stop: StopRequest,
        observe: Callable[[int, Instruction], None],
    ) -> None:
        self._observe = observe
        self._values: KeptValues | None = None
        self._config, self._prepared, self._progress = config, prepared, progress
        self._root, self._stop = root, stop
        self._run_dir = config.run.dir
        self._paths = RunPaths(self._run_dir)
        self._trees = config.store.commit.every > 1
        self._committer: Committer | None = None
        self._metrics: MetricsFile | None = None
        self._tier: Tier | None = None
        self._trace: TraceFile | None = None
        self._io = DirectIO(on_fallback=progress.note)
        self._backing = DiskBacking(
            self._run_dir,
            prepared.plan.layouts,
            self._io,
            micro_batches=config.data.micro_batches,
            deferred=prepared.plan.builder.deferred,
            verify=config.store.verify,
        )

    def open(
        self, *, fresh: bool, before: OptimizerConfig | None, back_to: Snapshot | None
    ) -> None:
        """Create the store or find the position in it; afterwards `training` is ready to run.

        `before` is the optimizer that an existing run has been trained with; `back_to` the snapshot
        that it goes back to first. Raises ConfigError before anything is written.
        """
        config, plan, run_dir = self._config, self._prepared.plan, self._run_dir
        self._backing.files.clear_saved()
        estimate = estimated_data_bytes(config) if self._root is None else 0
        needs = disk_needs(config, plan, self._backing, data_bytes=estimate)
        check_disk(needs, run_dir, self._progress.note)
        spare = spare_bytes(needs, run_dir)
        if back_to is not None:
            assert self._root is not None, "a snapshot is one of a run that exists"
            self._progress.note(f"verifying the snapshot of step {back_to.step}")
            verify_snapshot(back_to, self._root, self._io, self._stop)
        data, evaluation = self._open_data(fresh)
        if back_to is not None and self._root is not None:
            self._root = go_back(run_dir, back_to, self._root, self._progress.note)
        fingerprint, origin = plan.captured.model.fingerprint, self._prepared.built.initial.origin
        if fresh or (self._root is None and begun_otherwise(run_dir, fingerprint, origin)):
            start_over(run_dir)
        if self._root is None:
            record_origin(run_dir, origin)
        change = None
        if before is None or before == config.optimizer:
            self._record_config()
        else:
            change = OptimizerChange(before, update_rules(before), self._record_config)
        machine = disk_machine(config, self._prepared.device.device, self._progress.note)
        if machine is not None:
            plan = with_tier_cost(with_load_cost(plan, data), config, self._prepared.device)
        plan = self._choose(plan, machine, spare)
        if machine is not None and plan.builder.saves:  # what is saved takes slabs as well
            plan = with_tier_cost(plan, config, self._prepared.device)
        self._prepared.plan = plan
        self._expected_s = price(plan, config, machine).step_s
        self._backing.files.reserve_evaluated()
        self._slots, root = open_store(
            config,
            self._prepared,
            self._root,
            self._backing,
            self._io,
            note=self._progress.note,
            stop=self._stop,
        )
        floor = step_floor(plan, machine)
        self.training = self._open_training(root, data, evaluation, change, floor)

    def close(self) -> None:
        """End the threads, close the files and give all memory back; whatever was opened."""
        if self._committer is not None:
            self._committer.close()
        if self._values is not None:
            self._values.close()
        self._io.close()
        if self._trace is not None:
            self._trace.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._tier is not None:
            with suppress(torch.AcceleratorError):  # a device that failed has nothing under way
                self._prepared.device.synchronize()
            self._tier.close()
            self._pool.trim()
        release()

    def finish(self) -> None:
        """Delete what only training needs: spares, values, hand-offs.

        A last step that is also a snapshot gets slots of its own first, so that it is on the disk
        twice. A kill in the middle is completed by the next start, and so is a disk that cannot
        delete everything now: the run is complete, so that is no failure.
        """
        training = self.training
        training.commits.drain()
        training.metrics.give_back()
        if training.trees is not None:
            training.trees.finish()
        assert self._tier is not None, "training used it"
        self._tier.close()
        self._pool.trim()
        separate_all(
            self._slots,
            list(self._prepared.plan.layouts.state),
            self._io,
            step=training.step - 1,
            note=self._progress.note,
            stop=self._stop,
        )
        if self._values is not None:
            self._values.close()
        # On FUSE and NFS a file that is open while it is deleted stays, under another name.
        self._io.close()
        try:
            self._slots.delete_free()
            shutil.rmtree(self._paths.spill)
        except OSError as error:
            self._progress.note(
                f"{error.filename or self._paths.spill} could not be deleted "
                f"({error.strerror}): it is of no use any more. The same command deletes it, or you"
            )

    def _choose(self, plan: Plan, machine: Machine | None, disk_bytes: int) -> Plan:
        """Choose what makes steps shortest, and reserve room for what segments save."""
        config, files = self._config, self._backing.files
        chosen = choose_plan(plan, config, machine, disk_bytes=disk_bytes)
        try:
            files.reserve_saved(chosen.builder.saves)
        except RunError as error:  # a quota, which no free space shows
            self._progress.note(f"the backward recomputes all that it needs: {error}")
            files.clear_saved()
            chosen = choose_plan(plan, config, machine, disk_bytes=0)
        if config.store.commit.lag is None and chosen.lag > 1:
            self._progress.note(
                "on this disk steps are shorter where a killed run may repeat two segments' "
                "backwards instead of one, so it may (store.commit.lag)"
            )
        can, most = len(chosen.builder.saves), len(plan.captured.model.segments) - 1
        if config.train.recompute is False and can < most:
            self._progress.note(
                f"train.recompute is false, but only {can} of {most} segments can save what their "
                "backward needs: memory.host or the disk has no room for more"
            )
        return chosen

    def _record_config(self) -> None:
        path, content = self._paths.config, self._config.resolved_yaml().encode()
        # A run on a full disk can go on: what it writes is reserved, and this is there already.
        if not path.exists() or path.read_bytes() != content:
            write_aside(path, content)

    def _open_data(self, fresh: bool) -> tuple[Batches, Evaluation | None]:
        config, vocabulary = self._config, self._prepared.factory.vocabulary
        data = open_data(
            config.data,
            seed=config.train.seed,
            run_dir=self._run_dir,
            model_vocabulary=vocabulary,
            fresh=fresh,
            note=self._progress.note,
        )
        if config.eval is None:
            return data, None
        held_out = open_eval(
            config.eval,
            config.data,
            run_dir=self._run_dir,
            model_vocabulary=vocabulary,
            like=data,
            note=self._progress.note,
        )
        expected = self._prepared.plan.layouts.evaluated_batches
        if held_out.micro_batches != expected:
            raise ConfigError(
                f"eval: its data has {held_out.micro_batches} batches now and had {expected} when "
                "this start looked first: start again when nothing changes it"
            )
        weights = HeldOutWeights(
            held_out,
            self._prepared.plan.captured,
            by_tokens=self._prepared.weighting.by_tokens,
        )
        if weights.remark:
            self._progress.note(weights.remark)
        return data, Evaluation(weights, config.eval.every)

    def _loss_weights(self, data: Batches, source: DataConfig) -> LossWeights:
        weighting = self._prepared.weighting
        return LossWeights(
            data,
            weighting,
            self._prepared.plan.captured,
            self._progress.note,
            may_differ=weighting.may_differ(source),
        )

    def _open_training(
        self,
        root: RootRecord,
        data: Batches,
        evaluation: Evaluation | None,
        change: OptimizerChange | None,
        floor: Callable[[int, int, float, float], float | None],
    ) -> Training:
        """Take the memory, find the position, and put together what trains."""
        config, plan = self._config, self._measured_plan()
        pool = self._pool = self._prepared.device.pool(
            plan.pool_bytes, useful_bytes=useful_bytes(plan)
        )
        guard = BudgetGuard(
            pool,
            base_bytes=plan.base_bytes,
            host_bytes=config.memory.host,
            least_bytes=plan.peaks.instruction_bytes,
            own_bytes=OwnBytes(plan.captured, plan.measured),
        )
        tier = self._tier = Tier(pool, self._backing, let_go=self._prepared.device.synchronize)
        committer = self._committer = Committer(self._io, self._slots)
        self._backing.barrier = committer.drain
        commits = Commits(
            plan.layouts,
            self._backing,
            tier,
            committer,
            fingerprint=plan.captured.model.fingerprint,
        )
        position = find_resume_point(plan.layouts, self._slots, self._backing, root)
        metrics = self._metrics = MetricsFile(self._paths.metrics)
        if config.store.keeps_values:
            self._values = KeptValues(self._backing, tier, self._io)
        trees, steps, keep = None, config.train.steps, config.store.keep
        metrics.reserve(max(0, steps - position.decision.done))
        if self._trees:
            trees = Trees(
                plan.layouts,
                self._slots,
                self._backing,
                commits,
                root,
                last_step=steps,
                keep_every=keep.every if keep is not None else None,
            )
        snapshots = None
        if keep is not None:
            snapshots = Snapshots(
                self._slots,
                list(plan.layouts.state),
                every=keep.every,
                last=keep.last,
                root=root,
            )
        if self._prepared.weighting.matters:
            self._progress.note(str(self._prepared.weighting))
        self._progress.note(self._summary(plan))
        segments = len(plan.captured.model.segments)
        self._progress.start(steps, position.decision.step, segments)
        if config.run.trace:
            trace = self._paths.trace
            self._progress.note(f"writing what the next steps do when to {trace} (run.trace)")
            self._trace = TraceFile(trace, config.run.trace, self._progress.note)
        watch = Watch(self._stop, self._progress, segments, lambda: self.training.step, self._trace)
        return Training(
            config=config,
            plan=plan,
            data=data,
            weights=self._loss_weights(data, config.data),
            evaluation=evaluation,
            executor=Executor(
                tier,
                plan.operations,
                commits,
                guard,
                values=self._values,
                lag=plan.lag,
                begin=watch.begin,
                tick=watch.tick,
                observe=self._observe,
            ),
            commits=commits,
            tier=tier,
            pool=pool,
            io=self._io,
            metrics=metrics,
            position=position,
            trees=trees,
            boundary=Boundary(self._stop, ExportDoor(self._run_dir, self._progress.note)),
            values=self._values,
            note=self._progress.note,
            report=watch.step_done,
            floor_s=floor,
            change=change,
            snapshots=snapshots,
        )

    def _measured_plan(self) -> Plan:
        """Return the plan with the base as it is now: what creation took is no part of the arena.

        From here on the allocator keeps what it has.
        """
        release()
        retain()
        plan = replace(self._prepared.plan, base_bytes=resident_bytes())
        set_apart(plan.saved_tensors)
        return plan

    def _summary(self, plan: Plan) -> str:
        model = plan.captured.model
        reserved = self._backing.files.saved_bytes(plan.builder.saves)
        saved = f" ({format_size(reserved)} of disk are reserved for it)" if reserved else ""
        step = (
            ""
            if self._expected_s is None
            else f", about {format_duration(self._expected_s)} a step"
        )
        return (
            f"{model.parameter_count:,} parameters in {len(model.segments)} segments, of which "
            f"{len(plan.builder.saves)} save what the others recompute{saved}{step}; "
            f"base {format_size(plan.base_bytes)}, memory.host "
            f"{format_size(self._config.memory.host)}: {format_size(plan.pool_bytes)} of slabs, "
            f"{format_size(plan.arena_bytes)} for computing"
        )
