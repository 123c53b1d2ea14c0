"""Shows what a start does before the first step, from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swaptrain.units import format_duration

__all__ = ["StartTicker", "StartWork"]

_EVERY_S = 0.2
_BAR_COLUMNS, _LABEL_COLUMNS = 24, 44


@dataclass(frozen=True)
class StartWork:
    """What is being done, and how far it is."""

    label: str
    began_s: float
    done: int = 0
    total: int | None = None
    """None where nobody counts."""
    unit: str = ""

    def line(self, now_s: float) -> str:
        """Return it as a line of plain output."""
        count = "" if self.total is None else f"{self.unit} {self.done}/{self.total}, "
        return f"{self.label}: {count}{format_duration(now_s - self.began_s)} so far"

    def bar(self, now_s: float) -> Table:
        """Return it as a line of a terminal with a bar, which moves where nobody counts."""
        label = self.label
        if len(label) > _LABEL_COLUMNS:
            label = label[: _LABEL_COLUMNS - 3] + "..."
        bar = ProgressBar(
            total=self.total,
            completed=self.done,
            width=_BAR_COLUMNS,
            pulse=self.total is None,
            animation_time=now_s,
        )
        count = "" if self.total is None else f"{self.unit} {self.done}/{self.total}"
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(label), bar, count, format_duration(now_s - self.began_s))
        return row


class StartTicker:
    """Calls `show` five times a second with what is being done, from `begin` until `end`."""

    def __init__(
        self,
        show: Callable[[StartWork, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show, self._clock = show, clock
        self._work = StartWork("starting", clock())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def doing(self, note: str) -> None:
        """Take a note as what is being done, where it says so: `capturing ...`."""
        label = note if note.partition(" ")[0].endswith("ing") else "starting"
        self._work = StartWork(label, self._clock())

    def count(self, done: int, total: int, unit: str) -> None:
        """Say how far what is being done is."""
        self._work = replace(self._work, done=done, total=total, unit=unit)

    def end(self) -> None:
        """Show nothing any more; once is enough, more does no harm."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._show(self._work, self._clock())
