"""What a script hears of a run while it trains: it sees, changes no bit, and may end the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.run.signals import StopRequest
from swaptrain.run.steps.training import Training

__all__ = ["Listener"]


class Listener:
    """Calls functions on the thread that trains; one that raises ends the run where it is safe.

    `on_step` gets the row of metrics.jsonl of each step, `on_eval` that of each step with held-out
    losses, `on_commit` the last step that is on the disk, after the step in which that is found.
    """

    def __init__(
        self,
        on_step: Callable[[dict[str, Any]], object] | None = None,
        on_eval: Callable[[dict[str, Any]], object] | None = None,
        on_commit: Callable[[int], object] | None = None,
    ) -> None:
        self._on_step, self._on_eval, self._on_commit = on_step, on_eval, on_commit
        self.error: BaseException | None = None
        """What one of them has raised: to be raised again when the run has stopped."""
        self._committed = self._said = 0
        self._stop: StopRequest | None = None

    def follow(self, training: Training, stop: StopRequest) -> None:
        """Hear of the steps of a run that is about to train."""
        self._stop = stop
        self._committed = self._said = training.position.decision.done
        report = training.report

        def hear(row: StepMetrics) -> None:
            report(row)
            if training.trees is not None:
                self._is_committed(training.trees.step)
            else:  # on the thread that commits, after all that the step has written
                training.commits.then(lambda: self._is_committed(row.step))
            self._call(self._on_step, row.row())
            if row.held_out is not None:
                self._call(self._on_eval, row.row())
            self._say_committed()

        training.report = hear

    def finished(self, step: int) -> None:
        """Everything up to `step` is on the disk."""
        self._is_committed(step)
        self._say_committed()

    def _is_committed(self, step: int) -> None:
        self._committed = max(self._committed, step)

    def _say_committed(self) -> None:
        if self._committed > self._said:
            self._said = self._committed
            self._call(self._on_commit, self._said)

    def _call(self, function: Callable[..., object] | None, given: Any) -> None:
        if function is None or self.error is not None:
            return
        try:
            function(given)
        except BaseException as error:  # of a script; raised again once the run has stopped
            self.error = error
            if self._stop is not None:
                self._stop.ask()
