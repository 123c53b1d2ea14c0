"""Tells a person how training goes: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from statistics import fmean
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swaptrain.observe.output import silence
from swaptrain.observe.progress_line import Counted, RunSoFar, progress_line
from swaptrain.observe.start_ticker import StartTicker, StartWork
from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.units import format_duration, how_many

__all__ = ["LOG_COLUMNS", "Progress", "StepPhase"]

StepPhase = Literal["forward", "backward", "update", "eval", "exchange"]

_REFRESH_S = 0.1
_PLAIN_TICK_S = 30.0
# On a terminal steps may be faster than a person reads: the live line shows each of them, the
# scrollback gets one a second.
_SCROLLBACK_S = 1.0
_PLAIN_S, _PLAIN_PART = 10.0, 100
"""Elsewhere a line has ten seconds and a hundredth of the run to itself."""
LOG_COLUMNS = 160
"""Of a line that goes to no terminal."""
_ETA_STEPS = 16
_MEAN_STEPS = 50
"""Steps of which the mean of the loss is shown."""
_BAR_COLUMNS = 40


class _Console(Console):
    """A console that leaves the end of a pipe's reader to those who print."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError again; rich would end the process."""
        raise  # the error that rich is handling when it calls this


class Progress:
    """The progress of one run, used in a `with` block from the thread that runs the program.

    `console` is standard output unless a test gives another; `clock` returns seconds. Where it is
    no terminal a step has a line of its own every `log_every` steps; None: now and then.
    """

    def __init__(
        self,
        *,
        host_budget_bytes: int | None = None,
        log_every: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or _Console()
        self._host_budget_bytes, self._clock = host_budget_bytes, clock
        self._log_every = log_every
        self._counted: Counted = "tok"
        self._live: Live | None = None
        self._total_steps = self._written_bytes = 0
        self._last_line = ""
        self._recent_step_s: deque[float] = deque(maxlen=_ETA_STEPS)
        self._recent_bytes: deque[int] = deque(maxlen=_ETA_STEPS)
        self._recent_losses: deque[float] = deque(maxlen=_MEAN_STEPS)
        self._lined_step = 0
        self._step, self._step_began_s = 0, 0.0
        self._drawn_s = self._printed_s = self._lined_s = float("-inf")
        self._backwards = False
        self._ticker: StartTicker | None = None

    def __enter__(self) -> Self:
        """Take over the bottom lines of the terminal, if it is one."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = Live(console=self._console, auto_refresh=False, transient=True)
            with self._unless_silent():
                live.start()
                self._live = live
        self._ticker = StartTicker(self._show_work, self._clock)
        self._ticker.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the terminal back; the last step's line stays."""
        self._end_start()
        if self._live is not None:
            with self._unless_silent():
                self._live.stop()
            self._live = None
        if self._last_line:
            self._print(self._last_line)
            self._last_line = ""

    def start(
        self,
        total_steps: int,
        first_step: int,
        segments: int,
        *,
        written_bytes: int = 0,
        losses: Iterable[float] = (),
        counted: Counted = "tok",
    ) -> None:
        """Say what is about to run: steps first_step to total_steps over so many segments.

        `written_bytes` are those that the run has written so far, `losses` those of its steps;
        `counted` is what the data is counted in.

        None may be left of them, where a longer run is given less: what it began is completed.
        """
        self._end_start()
        self._total_steps, self._written_bytes = total_steps, written_bytes
        self._counted = counted
        self._recent_losses.extend(losses)
        self._step_began_s = self._printed_s = self._clock()
        if not total_steps:
            self.note("train.steps is 0: the initial weights are the run")
        elif first_step > total_steps:
            self.note(
                f"train.steps is {total_steps}, and the run is at step {first_step - 1}: the one "
                "that was begun, if any, is completed"
            )
        elif first_step > 1:
            self.note(
                f"going on with step {first_step} of {total_steps}, {how_many(segments, 'segment')}"
            )
        else:
            self.note(f"training {how_many(total_steps, 'step')}, {how_many(segments, 'segment')}")

    def start_evaluation(self, step: int, segments: int) -> None:
        """Say that `step` is looked at, over so many segments."""
        self._end_start()
        self._total_steps = step
        self._step_began_s = self._printed_s = self._clock()
        self.note(f"evaluating step {step}, {how_many(segments, 'segment')}")

    def tick(self, step: int, phase: StepPhase, segment: int, segments: int) -> None:
        """Say that an instruction begins, on segment `segment` (from 0); drawn 10 times a second.

        Without a terminal, a step that takes long gets a line every 30 s.
        """
        now_s = self._clock()
        if step != self._step:
            self._step, self._step_began_s = step, now_s
        # An update goes through the segments as what comes with it, and so does an exchange.
        if phase not in ("update", "exchange"):
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
        if self._has_line(metrics, now_s):
            self._last_line, self._lined_step, self._lined_s = "", metrics.step, now_s
            self._print(line)
        else:
            self._last_line = line
            self._draw(now_s)

    def _has_line(self, metrics: StepMetrics, now_s: float) -> bool:
        """Whether a step has a line that stays."""
        step = metrics.step
        if metrics.held_out is not None:
            return True
        if self._live is not None:
            return now_s - self._printed_s >= _SCROLLBACK_S
        if step == self._total_steps or not self._lined_step:
            return True
        if self._log_every is not None:
            return step % self._log_every == 0
        is_far = (step - self._lined_step) * _PLAIN_PART >= self._total_steps
        return is_far and now_s - self._lined_s >= _PLAIN_S

    def _line(self, metrics: StepMetrics) -> str:
        self._recent_step_s.append(metrics.step_s)
        self._written_bytes += metrics.write_bytes
        self._recent_bytes.append(metrics.write_bytes)
        mean_bytes = sum(self._recent_bytes) / len(self._recent_bytes)
        mean_s = sum(self._recent_step_s) / len(self._recent_step_s)
        if math.isfinite(metrics.loss):
            self._recent_losses.append(metrics.loss)
        losses = self._recent_losses
        so_far = RunSoFar(
            total_steps=self._total_steps,
            counted=self._counted,
            host_budget_bytes=self._host_budget_bytes,
            mean_loss=fmean(losses) if len(losses) > 1 else None,
            eta_s=mean_s * (self._total_steps - metrics.step),
            written_bytes=self._written_bytes,
            to_come_bytes=mean_bytes * (self._total_steps - metrics.step),
        )
        columns = self._console.width if self._live is not None else LOG_COLUMNS
        return progress_line(metrics, so_far, columns=columns)

    def note(self, text: str) -> None:
        """Show a line of its own; before the first step it is also what is being done."""
        if self._ticker is not None:
            self._ticker.doing(text)
        self._print(text)

    def count(self, done: int, total: int, unit: str) -> None:
        """Say how far a start is with what the last note said, in so many of `unit`."""
        if self._ticker is not None:
            self._ticker.count(done, total, unit)

    def _end_start(self) -> None:
        """End what shows the start: steps are shown from here on, or nothing."""
        if self._ticker is not None:
            self._ticker.end()
            self._ticker = None

    def _show_work(self, work: StartWork, now_s: float) -> None:
        """Show what a start does: a bar, or elsewhere a line where there was none for ten seconds.

        Called by the thread of the ticker.
        """
        if self._live is not None:
            with self._unless_silent():
                self._live.update(work.bar(now_s), refresh=True)
        elif now_s - max(self._printed_s, work.began_s) >= _PLAIN_S:
            self._print(work.line(now_s))

    def finish(self, text: str) -> None:
        """Show the last line of the run."""
        self._end_start()
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
