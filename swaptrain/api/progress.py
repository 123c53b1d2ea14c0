"""How a run is shown to a script: on a terminal, in a notebook, or not at all."""

from __future__ import annotations

import io
import sys
from typing import Any

from rich.console import Console

from swaptrain.observe.progress import Progress
from swaptrain.observe.step_metrics import StepMetrics

__all__ = ["progress_of"]


def progress_of(host_budget_bytes: int, *, quiet: bool) -> Progress:
    """Return what shows a run here."""
    if quiet:
        return Progress(console=Console(file=io.StringIO(), quiet=True))
    if _in_notebook():
        return _NotebookProgress(host_budget_bytes)
    return Progress(host_budget_bytes=host_budget_bytes)


def _in_notebook() -> bool:
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class _NotebookProgress(Progress):
    """One line that is written anew with each step; notes are lines of their own."""

    def __init__(self, host_budget_bytes: int) -> None:
        super().__init__(
            host_budget_bytes=host_budget_bytes,
            console=Console(file=sys.stdout, force_jupyter=False, force_terminal=False),
        )
        self._handle: Any = None

    def step_done(self, metrics: StepMetrics) -> None:
        """Write the line of a finished step over that of the one before."""
        from IPython.display import display

        text = {"text/plain": self._line(metrics)}
        if self._handle is None:
            self._handle = display(text, raw=True, display_id=True)
        else:
            self._handle.update(text, raw=True)
