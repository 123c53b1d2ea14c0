"""Held-out data in a run: when it is looked at, what it says, and whether that ends the run."""

from __future__ import annotations

from dataclasses import dataclass

from swaptrain.compute.weighting.held_out import HeldOutWeights
from swaptrain.observe.eval_history import EvalHistory
from swaptrain.observe.eval_result import EvalResult
from swaptrain.planning.planner import Plan
from swaptrain.program.instructions import Program
from swaptrain.ranks.together import Together
from swaptrain.run.steps.executor import Executor
from swaptrain.run.steps.step_state import StepState, no_rate

__all__ = ["Evaluation", "HeldOutLosses"]


@dataclass(frozen=True)
class Evaluation:
    """Held-out data and when to look at it."""

    weights: HeldOutWeights
    every: int
    first: bool
    """Before step 1 as well."""
    patience: int | None = None


class HeldOutLosses:
    """Computes held-out losses, and remembers those of the run."""

    def __init__(
        self, evaluation: Evaluation, plan: Plan, executor: Executor, together: Together | None
    ) -> None:
        self.evaluation = evaluation
        self.before: EvalResult | None = None
        """Of step 0; None where a process began after that."""
        self._plan, self._executor, self._together = plan, executor, together
        self._history = EvalHistory()

    def go_on_from(self, history: EvalHistory) -> None:
        """Take the losses of earlier steps, and add to them."""
        self._history = history

    def add(self, step: int, result: EvalResult | None) -> None:
        """Remember what was found after `step`, where anything was."""
        if result is not None:
            self._history.add(step, result.loss)

    def is_due(self, step: int) -> bool:
        """Whether the data is looked at after `step`."""
        return step % self.evaluation.every == 0

    def reason_to_end(self) -> str | None:
        """Return why `eval.patience` ends the run here; None where it does not."""
        history = self._history
        if not history.has_waited(self.evaluation.patience):
            return None
        assert history.lowest is not None, "what has waited has begun"
        step, loss = history.lowest
        return (
            f"the held-out loss has not been below {loss:.4f}, that of step {step}, for "
            f"{history.waited} evaluations: the run ends (eval.patience)"
        )

    def take(self, step: int, following: Program) -> EvalResult:
        """Compute the losses after `step`, of which no update pends; `following` comes next."""
        weights, builder = self.evaluation.weights, self._plan.builder
        state = StepState(
            step=step,
            load=weights.batch,
            update_step=step,
            rate=no_rate,
            batch_weights=weights.by_batch(),
        )
        self._executor.run(builder.evaluation(), state, following)
        if self._together is not None:
            count = sum(graph.batches for graph in builder.evaluations)
            self._together.merge_numbers(state.ledger, state.beside, count)
        beside = [state.beside[m] for m in sorted(state.beside)]
        return weights.result(state.ledger.in_order(), beside)
