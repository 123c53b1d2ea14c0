"""What others may want of a run between two steps: its weights, or its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from swaptrain.run.signals import Outlook, StopRequest
from swaptrain.store.read.export_request import ExportDoor
from swaptrain.units import format_duration

__all__ = ["Boundary"]

_NEAR_S = 60.0
"""With the unit `step`, a step that ends within this is finished and committed at a stop."""


class Boundary:
    """Knows where in its steps a run is, and what a stop or an export has to wait for.

    Between two steps the state is whole: all of one step, but for updates that wait for the next
    one. Then it can be committed, whatever store.commit.every is.
    """

    def __init__(
        self,
        stop: StopRequest,
        exports: ExportDoor | None,
        step: int,
        *,
        largest: Callable[[float], float] | None = None,
    ) -> None:
        """Take who may want something; `step` is the first one that is done.

        `largest` gives the largest of the numbers that the ranks of the run give, where there are
        several: then they stop together, after a step.
        """
        self._largest = largest
        stop.waits_for_ranks = largest is not None
        self._stop, self._exports = stop, exports
        self.committed: Callable[[], int] | None = None
        """With the unit `step`: the step that the disk has."""
        self.updates_left: Callable[[], bool] = lambda: False
        """Whether updates of the step before are still to be done, before a stop too."""
        self.whole: int | None = None
        """The step whose state is whole; None inside of a step."""
        self.step, self._begun_s = step, 0.0
        """`step` is the one that runs, or the last one."""
        self._last_s: float | None = None
        stop.outlook = self._outlook

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for a commit after this step."""
        if self._exports is None:
            return self._stop.is_requested
        return self._stop.is_requested or self._exports.is_wanted()

    def agree(self) -> None:
        """Let all ranks stop here where one of them was asked to."""
        if self._largest is not None and (number := int(self._largest(self._stop.number))):
            self._stop.agree(number)

    def begin(self, step: int) -> None:
        """Take note that a step begins."""
        self.whole = None
        self.step, self._begun_s = step, time.monotonic()

    def end(self, step: int) -> None:
        """Take note that the state is that of `step`: a stop may come from here on."""
        if self.step == step and self.whole is None:
            self._last_s = time.monotonic() - self._begun_s
        self.whole = step
        self._stop.release()

    def serve(self, step: int) -> None:
        """Let an export read `step`, which is committed as a whole; raise StoppedBySignal."""
        what = f"step {step}, which is committed"
        self._stop.check_after(what)
        if self._exports is not None:
            self._exports.let_in(step, lambda: self._stop.check_after(what))

    def _outlook(self) -> Outlook | None:
        if self._largest is not None:
            return Outlook(f"after step {self.step}, with all ranks")
        if self.committed is None:
            if self.updates_left():
                return Outlook(f"after {self._stop.what} and the updates of step {self.step - 1}")
            return None
        if self.whole is not None:
            return None
        left_s = float("inf")
        if self._last_s is not None:
            left_s = max(0.0, self._last_s - (time.monotonic() - self._begun_s))
        if left_s <= _NEAR_S:
            about = f", in about {format_duration(left_s)}" if left_s >= 1 else ""
            return Outlook(f"after step {self.step}{about}", hold=True)
        first = self.committed() + 1
        lost = f"step {first}" if first == self.step else f"steps {first} to {self.step}"
        return Outlook(f"after {self._stop.what} ({lost} will be done again)")
