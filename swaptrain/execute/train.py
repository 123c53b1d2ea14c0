"""The command that trains: starts a run, or goes on with it where it stopped."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import torch

from swaptrain.config import Config, OptimizerConfig, check_resume
from swaptrain.data import Batches, open_data, open_eval
from swaptrain.errors import ConfigError, RunError
from swaptrain.execute.commits import Commits
from swaptrain.execute.create import Creation, open_slots
from swaptrain.execute.disk import check_disk, disk_needs, estimated_data_bytes
from swaptrain.execute.executor import Executor
from swaptrain.execute.finished import begun_otherwise, finished_step, finished_text, start_over
from swaptrain.execute.floor import step_floor
from swaptrain.execute.guard import BudgetGuard
from swaptrain.execute.home import StoreHome
from swaptrain.execute.planning import Plan
from swaptrain.execute.prepare import Prepared, recorded_config, update_rule
from swaptrain.execute.resume import find_position
from swaptrain.execute.stopping import StopRequest
from swaptrain.execute.training import Change, Evaluation, Training
from swaptrain.execute.trees import Trees
from swaptrain.memory.malloc import release, retain
from swaptrain.memory.slab import Pool
from swaptrain.memory.tier import Tier
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.observe.metrics import MetricsFile
from swaptrain.observe.progress import Progress
from swaptrain.program.instructions import Instruction
from swaptrain.store.commit import Committer
from swaptrain.store.direct import DirectIO
from swaptrain.store.files import write_aside
from swaptrain.store.lock import RunLock
from swaptrain.store.recovery import flush_everything
from swaptrain.store.root import RootRecord, create_root, read_root
from swaptrain.store.slots import Slots
from swaptrain.units import format_size

__all__ = ["train"]


def train(config: Config, *, fresh: bool = False, accept_change: bool = False) -> None:
    """Train as `config` says, from the beginning or from where its run directory stopped.

    Raises ConfigError before anything is written when something is wrong with the input, RunError
    when the run fails and can be resumed, DamagedStoreError, StoppedBySignal.
    """
    run_dir = config.run.dir
    recorded = None if fresh else recorded_config(run_dir)
    if recorded is not None:
        config = check_resume(recorded, config, accept_change=accept_change)
    config = config.resolved()
    with (
        Progress(host_budget_bytes=config.memory.host) as progress,
        StopRequest() as stop,
        ExitStack() as held,
    ):
        # A run that another process trains is refused at once, not after the model's capture.
        lock = held.enter_context(RunLock(run_dir)) if (run_dir / "lock").exists() else None
        root = None if fresh else read_root(run_dir)
        if root is not None and (step := finished_step(run_dir, root, config)) is not None:
            progress.finish(finished_text(run_dir, step))
            return
        prepared = Prepared(config, root, progress.note)
        if root is not None:
            _check_choices(root, prepared, progress)
        stop.check_after("capturing the model")
        if lock is None:
            lock = held.enter_context(RunLock(run_dir))
            if root is None and not fresh and read_root(run_dir) is not None:
                raise RunError(f"another process has just begun {run_dir}: run the command again")
        before = recorded.resolved().optimizer if recorded is not None else None
        try:
            run = _OpenRun(config, prepared, root, progress, stop)
            held.callback(run.close)
            run.open(fresh=fresh, before=before)
        except ConfigError:
            lock.withdraw()
            raise
        try:
            run.training.run()
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"the device has no memory left ({str(error).splitlines()[0]}): lower "
                "data.micro_batch, or raise memory.device; then run the same command to go on"
            ) from error
        run.finish()
        progress.finish(finished_text(run_dir, run.training.step - 1))


def _check_choices(root: RootRecord, prepared: Prepared, progress: Progress) -> None:
    """Refuse another device than the store was begun on; say that other versions may differ."""
    device = str(prepared.device.device)
    recorded = root.choices["update_device"]
    if device != recorded:
        raise ConfigError(
            f"the run was begun on {recorded} and would go on on {device}, with other bits: set "
            f"device to {recorded}, or start over with --fresh"
        )
    if root.choices["torch"] != torch.__version__:
        progress.note(
            f"the run was begun with torch {root.choices['torch']}, this is {torch.__version__}: "
            "it goes on, but the last bits of its results may differ"
        )


class _OpenRun:
    """A run directory that is open for writing, and everything that trains in it."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        root: RootRecord | None,
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        self._config, self._prepared, self._progress = config, prepared, progress
        self._root, self._stop = root, stop
        self._run_dir = config.run.dir
        self._committer: Committer | None = None
        self._metrics: MetricsFile | None = None
        self._tier: Tier | None = None
        self._io = DirectIO(on_fallback=self._progress.note)

    def open(self, *, fresh: bool, before: OptimizerConfig | None) -> None:
        """Create the store or find the position in it; afterwards `training` is ready to run."""
        config, prepared, progress = self._config, self._prepared, self._progress
        root = self._root
        plan, run_dir = prepared.plan, config.run.dir
        self._run_dir = run_dir
        with_trees = config.store.commit_every > 1
        self._home = StoreHome(
            run_dir,
            plan.layouts,
            self._io,
            micro_batches=config.data.micro_batches,
            deferred=plan.builder.deferred,
        )
        if root is None:
            needs = disk_needs(config, plan, self._home, data_bytes=estimated_data_bytes(config))
            check_disk(needs, run_dir)
        data, evaluation = self._open_data(fresh)
        fingerprint = plan.captured.model.fingerprint
        if fresh or (root is None and begun_otherwise(run_dir, fingerprint)):
            start_over(run_dir)
        change = None
        if before is None or before == config.optimizer:
            self._record_config()
        else:
            change = Change(before, update_rule(before), self._record_config)
        floor = step_floor(config, plan, prepared.device.device, progress.note)
        flush_everything(run_dir)
        self._slots = Slots(run_dir, config.store.paths, trees=with_trees)
        open_slots(self._slots, plan.layouts, plan, trees=with_trees)
        creation = Creation(run_dir, plan, self._slots, self._home, self._io)
        if root is None:
            root = self._create(creation, with_trees)
        else:
            creation.open()
        prepared.built.construction.forget()
        release()  # what creating the store took is no part of the arena
        retain()
        plan = replace(plan, base_bytes=resident_bytes())
        pool = Pool(plan.pool_bytes, pin=prepared.device.pin, unpin=prepared.device.unpin)
        self._pool = pool
        guard = BudgetGuard(
            pool,
            base_bytes=plan.base_bytes,
            host_bytes=config.memory.host,
            least_bytes=plan.peaks.instruction_bytes,
        )
        tier = self._tier = Tier(pool, self._home)
        committer = self._committer = Committer(self._io, self._slots)
        self._home.barrier = committer.drain
        commits = Commits(
            plan.layouts,
            self._home,
            tier,
            committer,
            fingerprint=fingerprint,
            micro_batches=config.data.micro_batches,
        )
        position = find_position(
            plan.layouts, self._slots, self._home, root, deferred=plan.builder.deferred
        )
        metrics = self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        segments = len(plan.captured.model.segments)
        steps = config.train.steps
        trees = None
        if with_trees:
            trees = Trees(plan.layouts, self._slots, self._home, commits, root, last_step=steps)

        def tick(instruction: Instruction) -> None:
            if instruction.segment:
                progress.tick(
                    self.training.step,
                    _PHASES[instruction.operation],
                    instruction.segment - 1,
                    segments,
                )
            self._stop.check(instruction, segments)

        self.training = Training(
            config=config,
            plan=plan,
            data=data,
            evaluation=evaluation,
            executor=Executor(tier, plan.operations, commits, guard, tick=tick),
            commits=commits,
            tier=tier,
            pool=pool,
            io=self._io,
            metrics=metrics,
            position=position,
            trees=trees,
            report=progress.step_done,
            floor_s=floor,
            change=change,
        )
        progress.note(self._summary(plan))
        progress.start(steps, position.decision.step, segments)

    def close(self) -> None:
        """End the threads, close the files and give all memory back; whatever was opened."""
        if self._committer is not None:
            self._committer.close()
        self._io.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._tier is not None:
            self._tier.close()
            self._pool.trim()
        release()

    def finish(self) -> None:
        """Delete what only training needs: spares, values, hand-offs."""
        self.training.commits.drain()
        if self.training.trees is not None:
            self.training.trees.finish()
        self._slots.delete_free()
        shutil.rmtree(self._run_dir / "spill", ignore_errors=False)

    def _record_config(self) -> None:
        write_aside(self._run_dir / "config.yaml", self._config.resolved_yaml().encode())

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
        return data, Evaluation(held_out, config.eval.every, config.eval.batches)

    def _create(self, creation: Creation, trees: bool) -> RootRecord:
        plan, model = self._prepared.plan, self._prepared.plan.captured.model
        self._progress.note(f"writing {model.parameter_count:,} initial weights to {self._run_dir}")
        creation.write(
            self._prepared.built.construction,
            lambda k: self._stop.check_after(f"writing segment {k}/{len(model.segments)}"),
            trees=trees,
        )
        root = RootRecord(
            fingerprint=model.fingerprint,
            segments=[
                {
                    "segment": segment.index,
                    "unit": segment.unit,
                    "isomorphism": segment.isomorphism,
                    "parameters": list(segment.owns),
                }
                for segment in model.segments
            ],
            commit_every=self._config.store.commit_every,
            choices={
                "cuts": plan.cuts,
                "threads": self._prepared.threads,
                "dtype": self._config.model.dtype,
                "torch": torch.__version__,
                "update_device": str(self._prepared.device.device),
            },
        )
        if trees:
            create_root(self._run_dir, root, tree="a")
            self._slots.switch_tree()
        else:
            create_root(self._run_dir, root)
        return root

    def _summary(self, plan: Plan) -> str:
        model = plan.captured.model
        return (
            f"{model.parameter_count:,} parameters in {len(model.segments)} segments; "
            f"base {format_size(plan.base_bytes)}, memory.host "
            f"{format_size(self._config.memory.host)}: {format_size(plan.pool_bytes)} of slabs, "
            f"{format_size(plan.arena_bytes)} for computing"
        )


_PHASES: dict[str, Literal["forward", "backward", "update", "eval"]] = {
    "load": "forward",
    "forward": "forward",
    "turn": "backward",
    "backward": "backward",
    "keep": "backward",
    "settle": "update",
    "update": "update",
    "evaluate": "eval",
}


if sys.platform != "linux":  # O_DIRECT, flock, /proc
    raise ConfigError("swaptrain runs on Linux")
