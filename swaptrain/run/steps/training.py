"""The steps of an open run: programs one after the other, commits after them, one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from swaptrain.compute.learning_rate import learning_rate
from swaptrain.compute.loss_scale import LossScale
from swaptrain.compute.update import Rules
from swaptrain.compute.weighting.counts import LossWeights
from swaptrain.config.optimizer import OptimizerConfig
from swaptrain.config.schema import Config
from swaptrain.data.batches import Batches
from swaptrain.durable.activations import Activations
from swaptrain.durable.commits import Commits
from swaptrain.durable.ledger import Ledger
from swaptrain.durable.tree_commits import Trees
from swaptrain.errors import StoppedBySignal
from swaptrain.memory.slab import SlabPool
from swaptrain.memory.tier import Tier
from swaptrain.observe.eval_history import EvalHistory
from swaptrain.observe.eval_result import EvalResult
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.observe.metrics import MetricsFile
from swaptrain.observe.progress_line import resume_line
from swaptrain.observe.reports import Reports
from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.planning.planner import Plan
from swaptrain.program.durability import CommitUnit
from swaptrain.program.forwards import recoverable
from swaptrain.program.instructions import ObjectKey, Program
from swaptrain.ranks.together import Together
from swaptrain.run.resume import ResumePoint
from swaptrain.run.steps.boundary import Boundary
from swaptrain.run.steps.evaluation import Evaluation, HeldOutLosses
from swaptrain.run.steps.executor import Executor
from swaptrain.run.steps.rows import Floor, MetricRows
from swaptrain.run.steps.step_state import StepState, global_norm, no_rate
from swaptrain.spans import span
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.slots.recovery_rules import Action
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import Snapshots

__all__ = ["OptimizerChange", "Training"]


@dataclass(frozen=True)
class OptimizerChange:
    """A change of the optimizer, from the next boundary between two steps on."""

    before: OptimizerConfig
    rules: Rules
    """Of `before`."""
    record: Callable[[], None]
    """Writes the new config into the run directory."""


@dataclass
class Training:
    """Everything that a step needs, and the position of the run."""

    config: Config
    plan: Plan
    data: Batches
    weights: LossWeights
    """Reads the data, and weights the losses of its steps."""
    evaluation: Evaluation | None
    executor: Executor
    commits: Commits
    slots: Slots
    tier: Tier
    pool: SlabPool
    io: DirectIO
    metrics: MetricsFile
    reports: Reports
    position: ResumePoint
    trees: Trees | None
    boundary: Boundary
    values: Activations | None
    """Keeps what forwards make; None where a killed run is to make it again."""
    note: Callable[[str], None]
    report: Callable[[StepMetrics], None]
    floor_s: Floor
    change: OptimizerChange | None = None
    snapshots: Snapshots | None = None
    together: Together | None = None
    """The other ranks of the run."""
    sample: Callable[[int, int], None] | None = None
    """Writes what the model says after an evaluated step, in so many bytes of memory."""
    step: int = field(init=False)
    """The step that is being done, or the next one."""
    _pending: tuple[int, ...] = field(init=False)
    """Segments whose update waits for the norms of the whole step."""
    _ledger: Ledger = field(init=False)
    """Of the step before."""
    _scale: LossScale | None = field(init=False, default=None)
    """Of the loss of the next step, in float16."""
    _rows: MetricRows = field(init=False)
    _held_out: HeldOutLosses | None = field(init=False, default=None)
    """Where there is held-out data."""
    _losses: dict[int, float] = field(init=False, default_factory=dict)
    """Held-out losses of the run by step, those that are numbers; of starts with other data too."""
    _running: StepState | None = field(init=False, default=None)
    """Of the program that runs, where it may do pending updates."""

    def __post_init__(self) -> None:
        decision = self.position.decision
        self.step, self._pending = decision.step, decision.pending
        self._ledger = self.position.ledger
        self._rows = MetricRows(
            self.plan, self.data, self.weights, self.tier, self.io, self.floor_s, self.together
        )
        if self.evaluation is not None:
            self._held_out = HeldOutLosses(self.evaluation, self.plan, self.executor, self.together)
        if self.config.model.dtype == "float16":
            self._scale = self.position.finished.next_scale() or LossScale()
        self.boundary.updates_left = lambda: bool(self._updates_left())
        self.boundary.committed = (lambda t=self.trees: t.step) if self.trees else None

    def run(self) -> None:
        """Run all steps that are left; when it returns, everything is durable and nothing pends."""
        self._rows.start()
        self.metrics.cut_after(self.position.decision.done)
        self.reports.start(self.position.decision.done)
        try:
            if self.change is None:
                self._finish_interrupted()
            else:
                self._finish_before_change(self.change)
            self.boundary.end(self.step - 1)
            self._between(self.step - 1)
            self._evaluate_first()
            while self.step <= self.config.train.last_step and not self._ends_early():
                self._step(self.step, None)
                self.step += 1
                self._between(self.step - 1)
            self._flush(self.step - 1)
        except StoppedBySignal as stop:
            self._save_what_is_done(stop)
            self.commits.drain()
            raise
        self.commits.drain()
        self.tier.drain()

    def _ends_early(self) -> bool:
        """Whether the held-out loss has not fallen for `eval.patience`: then the run ends here."""
        reason = None if self._held_out is None else self._held_out.reason_to_end()
        if reason is None:
            return False
        self.note(reason)
        if self.trees is not None and self.trees.step != self.step - 1:
            self._commit_tree(self.step - 1)
        return True

    def _finish_interrupted(self) -> None:
        """Complete the step that an earlier process began to commit, whatever train.steps says."""
        decision = self.position.decision
        self._complete_metrics(decision.done)
        history = EvalHistory(self.metrics.rows())
        self._losses = history.losses
        if self._held_out is not None:
            self._held_out.go_on_from(history)
        if decision.action is Action.CONTINUE:
            self.commits.handoff.adopt(self.position.handoff)
            self._step(self.step, decision.segment)
            self.step += 1
        else:
            self._keep(decision.done)  # a kill may have come before it

    def _finish_before_change(self, change: OptimizerChange) -> None:
        """Do what is left of the interrupted step under the optimizer that began it."""
        after, rules = self.config, self.plan.operations.rules
        self.config = after.model_copy(update={"optimizer": change.before})
        self.plan.operations.rules = change.rules
        self._finish_interrupted()
        self._flush(self.step - 1)
        self.commits.drain()
        change.record()
        self.config, self.plan.operations.rules = after, rules

    def _step(self, step: int, top: int | None) -> None:
        begun = self._rows.begin()
        with span(f"step {step}"):
            state = self._carry_out(step, top)
        row = self._rows.make(begun, state, self._lr(step), resumed=top is not None)
        held_out = self._evaluate(step)
        if self._held_out is not None:
            self._held_out.add(step, held_out)
            before = self._held_out.before if step == 1 else None
            row = replace(row, held_out=held_out, held_out_before=before)
        self.commits.then(lambda: self.metrics.append(row))
        self._keep(step)
        self.report(row)
        if held_out is not None:
            self._sample(step)

    def _carry_out(self, step: int, top: int | None) -> StepState:
        """Run the program of a step, and commit it where the store is committed as a whole."""
        self.boundary.begin(step)
        program = self._program(step, top)
        self._running = state = self._state(step)
        state.weights = self.weights.of_step(step)
        state.ledger.scale = self._scale
        if top is not None:
            state.ledger = self._ledger
        self.executor.run(program, state, self._following(step))
        if self.together is not None:
            self.together.merge_norms(state.ledger)
        self._ledger, self._scale = state.ledger, state.ledger.next_scale()
        if self.plan.builder.deferred:
            self._pending = self.plan.pending
            self._running = None  # which has done another step's updates
        self.boundary.end(step)
        if self.trees is not None and self.trees.is_commit_step(step):
            self._flush(step, quiet=True)
            self.trees.switch(step)
        return state

    def _keep(self, step: int) -> None:
        """Have a snapshot made of `step`, the last one done, if one is due.

        After everything of the step and before anything of the next one: what is live then is it.
        """
        snapshots, losses = self.snapshots, self._losses
        if snapshots is None or not snapshots.due(step, losses):
            return
        if self.trees is None:
            self._flush(step)
        elif self.trees.step != step:
            self._commit_tree(step)
        self.commits.then(lambda: snapshots.make(step, losses))

    def _sample(self, step: int) -> None:
        """Have texts written, after `step`: from the store, while memory holds nothing else."""
        if self.sample is None:
            return
        self._make_whole(step)
        self.tier.empty()
        self.pool.trim()
        taken_bytes = resident_bytes() - self.plan.base_bytes - self.pool.held_bytes
        self.sample(step, self.config.memory.host - max(0, taken_bytes))

    def _program(self, step: int, top: int | None) -> Program:
        """Return the program of a step; of the one that an earlier process began, what is left."""
        builder, decision = self.plan.builder, self.position.decision
        if step != decision.step and self._pending == self.plan.pending:
            return self.plan.step
        if step != decision.step:
            return builder.step(pending_updates=self._pending)
        build = partial(builder.step, pending_updates=self._pending, top=top)
        found: Mapping[ObjectKey, Sequence[int]] = {}
        if self.values is not None:
            found = self.values.found(step, recoverable(build()))
        program = build(present=found)
        if self.values is not None:
            self.values.adopt(found, program)
        if step > 1 or top is not None or found:
            segments = len(self.plan.captured.model.segments)
            self.note(resume_line(program, step, found, top=top, segments=segments))
        return program

    def _state(self, step: int) -> StepState:
        """Return what a step's instructions mean; a deferred update is of the step before."""
        builder = self.plan.builder
        update_step = step - 1 if builder.deferred else step
        first = builder.ranks.first(self.data.micro_batches)
        clip = self.config.optimizer.clip_norm
        pending = bool(self._pending)
        return StepState(
            step=step,
            load=lambda m: self.weights.batch(step, first + m),
            items=lambda m: self.weights.items(step, m),
            update_step=update_step,
            rate=self._rate(update_step) if update_step else no_rate,
            update_norm=global_norm(self._ledger, list(self.plan.captured.model.parameters))
            if pending
            else None,
            clip_norm=clip,
            update_ledger=self._ledger if pending else None,
            first=first,
            micro_batches=self.data.micro_batches if self.together is not None else 0,
            unit=self._unit(step, updates=not builder.deferred),
        )

    def _unit(self, step: int, *, updates: bool = True) -> CommitUnit:
        """Return the unit that a program commits; `updates`: whether it holds those of `step`."""
        if self.trees is None:
            return "segment"
        return "step" if updates and self.trees.is_commit_step(step) else "nothing"

    def _flush(self, step: int, *, quiet: bool = False) -> None:
        """Do the updates of `step` that are pending: before evaluation, export and the end."""
        if not self._pending:
            return
        self._running = state = self._state(step + 1)
        state.unit = self._unit(step)
        self.executor.run(self.plan.builder.flush(self._pending), state, quiet=quiet)
        self._pending = ()

    def _between(self, step: int) -> None:
        """Make the store whole after `step` if somebody wants that: an export, or a stop."""
        self.boundary.agree()
        if self.boundary.is_wanted:
            self._make_whole(step)
            self.boundary.serve(step)

    def _make_whole(self, step: int) -> None:
        """Make everything of `step`, the last one done, durable."""
        if self.trees is None:
            self._flush(step)
            self.commits.drain()
        elif self.trees.step != step:
            self._commit_tree(step)

    def _commit_tree(self, step: int) -> None:
        """Commit after a step for which that was not planned (with the unit `step`)."""
        assert self.trees is not None
        self.trees.include(step)
        if self._pending:
            self._flush(step, quiet=True)
        else:
            state = self._state(step)
            state.update_step, state.ledger, state.unit = step, self._ledger, "step"
            self.executor.run(self.plan.builder.store(), state, quiet=True)
        self.trees.switch(step)

    def _save_what_is_done(self, stop: StoppedBySignal) -> None:
        """Before stopping: do the pending updates that the program has not come to.

        With the unit `step` only a stop between two steps would commit them.
        """
        whole = self.boundary.whole
        if self.trees is not None and (whole is None or whole == self.trees.step):
            return
        if self._running is not None:
            rest = self._updates_left()
            self._running.updated.update(rest)
            self.executor.run(self.plan.builder.flush(rest), self._running, quiet=True)
            self._pending = ()
        if self.trees is not None and whole is not None:
            self._commit_tree(whole)
            stop.args = (
                f"stopped after step {whole}, which is committed; run the same command to go on",
            )

    def _updates_left(self) -> list[int]:
        """Return the segments whose pending update the program that runs has not come to."""
        if self._running is None:
            return []
        return [k for k in self._pending if k not in self._running.updated]

    def _complete_metrics(self, done: int) -> None:
        """Write the line of the last step if a kill lost it."""
        last = self.metrics.last_step() or 0
        if last < done - 1:
            self.note(
                f"{self.metrics.path} lacks the lines of steps {last + 1} to {done - 1}, which "
                "somebody has removed; nothing else depends on them"
            )
        losses = self.position.finished.in_order()
        missing = bool(done and (self.metrics.last_step() or 0) < done and losses)
        # All ranks evaluate together, also those that have the line.
        if missing if self.together is None else self.together.any(missing):
            row = self._rows.missing(done, self.position.finished, self._lr(done))
            row = replace(row, held_out=self._evaluate(done))
            if missing:
                self.metrics.append(row)

    def _evaluate(self, step: int) -> EvalResult | None:
        """Return what the held-out data says after `step` when it is due."""
        if self._held_out is None or not self._held_out.is_due(step):
            return None
        self._flush(step)
        return self._held_out.take(step, self._following(step))

    def _evaluate_first(self) -> None:
        """Take the held-out loss of what the run begins from, before anything of step 1."""
        held_out = self._held_out
        if held_out is None or not held_out.evaluation.first or self.step > 1:
            return
        if self.config.train.last_step:
            held_out.before = held_out.take(0, self._following(0))
            self.note(f"before step 1: {held_out.before.text()}")

    def evaluate(self) -> EvalResult:
        """Return what the held-out data says of the last step that is done."""
        assert self._held_out is not None, "there is held-out data"
        return self._held_out.take(self.step - 1, self._following(self.step - 1))

    def _following(self, step: int) -> Program:
        return self.plan.step if step < self.config.train.last_step else ()

    def _lr(self, step: int) -> float:
        return self._rate(step)(self.config.optimizer.lr)

    def _rate(self, step: int) -> Callable[[float], float]:
        schedule = self.config.optimizer.schedule
        return lambda lr: learning_rate(step, lr=lr, schedule=schedule)
