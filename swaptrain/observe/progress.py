"""Tells a person how training goes: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swaptrain.observe.output import silence
from swaptrain.observe.progress_line import progress_line
from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.units import format_duration

__all__ = ["Progress", "StepPhase"]

StepPhase = Literal["forward", "backward", "update", "eval"]

_REFRESH_S = 0.1
_PLAIN_TICK_S = 30.0
# On a terminal steps may be faster than a person reads: the live line shows each of them, the
# scrollback gets one a second.
_SCROLLBACK_S = 1.0
_ETA_STEPS = 16
_BAR_COLUMNS = 40


class _Console(Console):
    """A console that leaves the end of a pipe's reader to those who print."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError again; rich would end the process."""
        raise  # the error that rich is handling when it calls this


class Progress:
    """The progress of one run, used in a `with` block from the thread that runs the program.

    `console` is standard output unless a test gives another; `clock` returns seconds.
    """

    def __init__(
        self,
        *,
        host_budget_bytes: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or _Console()
        self._host_budget_bytes, self._clock = host_budget_bytes, clock
        self._live: Live | None = None
        self._total_steps = self._written_bytes = 0
        self._last_line = ""
        self._recent_step_s: deque[float] = deque(maxlen=_ETA_STEPS)
        self._recent_bytes: deque[int] = deque(maxlen=_ETA_STEPS)
        self._step, self._step_began_s = 0, 0.0
        self._drawn_s = self._printed_s = float("-inf")
        self._backwards = False

    def __enter__(self) -> Self:
        """Take over the bottom lines of the terminal, if it is one."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = Live(console=self._console, auto_refresh=False, transient=True)
            with self._unless_silent():
                live.start()
                self._live = live
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the terminal back; the last step's line stays."""
        if self._live is not None:
            with self._unless_silent():
                self._live.stop()
            self._live = None
            if self._last_line:
                self._print(self._last_line)

    def start(
        self, total_steps: int, first_step: int, segments: int, *, written_bytes: int = 0
    ) -> None:
        """Say what is about to run: steps first_step to total_steps over so many segments.

        `written_bytes` are those that the run has written so far.

        None may be left of them, where a longer run is given less: what it began is completed.
        """
        self._total_steps, self._written_bytes = total_steps, written_bytes
        self._step_began_s = self._printed_s = self._clock()
        if not total_steps:
            self.note("train.steps is 0: the initial weights are the run")
        elif first_step > total_steps:
            self.note(
                f"train.steps is {total_steps}, and {first_step - 1} steps are done: the one that "
                "was begun, if any, is completed"
            )
        elif first_step > 1:
            self.note(f"going on with step {first_step} of {total_steps}, {segments} segments")
        else:
            self.note(f"training {total_steps} steps, {segments} segments")

    def start_evaluation(self, step: int, segments: int) -> None:
        """Say that `step` is looked at, over so many segments."""
        self._total_steps = step
        self._step_began_s = self._printed_s = self._clock()
        self.note(f"evaluating step {step}, {segments} segments")

    def tick(self, step: int, phase: StepPhase, segment: int, segments: int) -> None:
        """Say that an instruction begins, on segment `segment` (from 0); drawn 10 times a second.

        Without a terminal, a step that takes long gets a line every 30 s.
        """
        now_s = self._clock()
        if step != self._step:
            self._step, self._step_began_s = step, now_s
        if phase != "update":  # an update goes through the segments as what comes with it
            self._backwards = phase == "backward"
        if self._live is not None:
            self._draw(now_s, phase, segment, segments)
        elif now_s - max(self._printed_s, self._step_began_s) >= _PLAIN_TICK_S:
            self._print(
                f"step {step}/{self._total_steps} | {phase}, segment {segment + 1}/{segments}"
                f" | {format_duration(now_s - self._step_began_s)}"
            )

    def step_done(self, metrics: StepMetrics) -> None:
        """Show the line of a finished step."""
        line = self._line(metrics)
        now_s = self._clock()
        quick = now_s - self._printed_s < _SCROLLBACK_S
        if self._live is not None and quick and metrics.held_out is None:
            self._last_line = line
            self._draw(now_s)
        else:
            self._last_line = ""
            self._print(line)

    def _line(self, metrics: StepMetrics) -> str:
        self._recent_step_s.append(metrics.step_s)
        self._written_bytes += metrics.write_bytes
        self._recent_bytes.append(metrics.write_bytes)
        mean_bytes = sum(self._recent_bytes) / len(self._recent_bytes)
        mean_s = sum(self._recent_step_s) / len(self._recent_step_s)
        return progress_line(
            metrics,
            total_steps=self._total_steps,
            host_budget_bytes=self._host_budget_bytes,
            eta_s=mean_s * (self._total_steps - metrics.step),
            written_bytes=self._written_bytes,
            to_come_bytes=mean_bytes * (self._total_steps - metrics.step),
        )

    def note(self, text: str) -> None:
        """Show a line of its own."""
        self._print(text)

    def finish(self, text: str) -> None:
        """Show the last line of the run."""
        if self._last_line:
            self._print(self._last_line)
            self._last_line = ""
        if self._live is not None:
            with self._unless_silent():
                self._live.update(Text(""), refresh=True)
        self._print(text)

    def _print(self, text: str) -> None:
        self._printed_s = self._clock()
        with self._unless_silent():
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    @contextmanager
    def _unless_silent(self) -> Iterator[None]:
        """Write to the console; from its first failure on nothing is written any more.

        A log on a full disk, or a pipe whose reader has gone, does not end days of training: what
        it would have said is in metrics.jsonl.
        """
        try:
            yield
        except OSError as error:
            live, self._live = self._live, None
            silence(self._console.file)
            with suppress(OSError):  # the standard error may have failed with it
                reason = os.strerror(error.errno or errno.EIO)
                print(
                    f"swaptrain: the standard output cannot be written to ({reason}): the run goes "
                    "on without it, and metrics.jsonl has all steps",
                    file=sys.stderr,
                    flush=True,
                )
            if live is not None:
                live.stop()

    def _draw(
        self, now_s: float, phase: str = "", segment: int | None = None, segments: int = 1
    ) -> None:
        """Draw the last step's line and the bar of the present one, ten times a second at most."""
        if self._live is None or now_s - self._drawn_s < _REFRESH_S:
            return
        self._drawn_s = now_s
        bar = Table.grid(padding=(0, 1))
        if segment is not None:
            passed = segments - 1 - segment if self._backwards else segment
            bar.add_row(
                f"step {self._step}/{self._total_steps}",
                phase,
                ProgressBar(total=max(1, segments), completed=passed, width=_BAR_COLUMNS),
                f"segment {segment + 1}/{segments}",
                format_duration(now_s - self._step_began_s),
            )
        lines = [Text(self._last_line)] if self._last_line else []
        with self._unless_silent():
            self._live.update(Group(*lines, bar), refresh=True)
