"""What a person sees while training runs."""

from __future__ import annotations

import io
import math
from threading import Event
from typing import Any

import pytest
from rich.console import Console

from swaptrain.observe.eval_result import EvalResult
from swaptrain.observe.progress import LOG_COLUMNS, Progress
from swaptrain.observe.progress_line import RunSoFar, progress_line
from swaptrain.observe.start_ticker import StartTicker, StartWork
from swaptrain.observe.step_metrics import StepMetrics

GIB = 2**30


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def metrics(step: int = 12, **fields: Any) -> StepMetrics:
    return StepMetrics(
        **{"step": step, "loss": 3.21414, "lr": 1e-3, "tokens": 67_568, "step_s": 41.2, **fields}
    )


def console(*, terminal: bool) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=100,
        height=30,
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


FULL = metrics(
    read_bytes=96 * GIB,
    write_bytes=71 * GIB,
    peak_host_bytes=int(21.7 * GIB),
    cache_hit_fraction=0.63,
    io_wait_s=3.3,
    epoch=0.3125,
)
RUN = RunSoFar(
    total_steps=200,
    host_budget_bytes=24 * GIB,
    mean_loss=3.31049,
    eta_s=7560.0,
    written_bytes=910 * 10**9,
    to_come_bytes=14.33e12,
)


def test_the_line_of_a_step() -> None:
    """The line has each number that a person can act on, in its unit, the important ones first."""
    assert progress_line(FULL, RUN) == (
        "step 12/200 | loss 3.2141 | mean 3.3105 | 41.2 s | 1,640 tok/s | eta 2.1 h"
        " | waiting for disk 8% | 910.0 GB of 15.24 TB written | RAM 21.7/24 GiB, hit 63%"
        " | read 96.0 GiB at 2.3 GiB/s | wrote 71.0 GiB | epoch 0.31 | lr 0.001"
    )
    in_a_log = progress_line(FULL, RUN, columns=LOG_COLUMNS)
    assert "910.0 GB of 15.24 TB written" in in_a_log and "RAM 21.7/24 GiB" in in_a_log


def test_a_narrow_line_leaves_out_what_matters_least() -> None:
    """From the end; the step and its loss stay in any width."""
    assert progress_line(FULL, RUN, columns=100) == (
        "step 12/200 | loss 3.2141 | mean 3.3105 | 41.2 s | 1,640 tok/s | eta 2.1 h"
        " | waiting for disk 8%"
    )
    assert progress_line(FULL, RUN, columns=40) == "step 12/200 | loss 3.2141 | mean 3.3105"
    assert progress_line(FULL, RUN, columns=1) == "step 12/200 | loss 3.2141"
    for columns in range(30, 240):
        assert len(progress_line(FULL, RUN, columns=columns)) <= columns


def test_data_without_tokens_is_counted_in_items() -> None:
    line = progress_line(metrics(tokens=64, step_s=2.0), RunSoFar(total_steps=20, counted="items"))
    assert " | 32 items/s | " in line and "tok/s" not in line


def test_the_line_leaves_out_what_is_not_known() -> None:
    """No disk traffic, no budget, last step, a loss that is not finite, a step of no time."""
    line = progress_line(
        metrics(step=200, loss=math.nan, step_s=0.0, held_out=EvalResult(2.5)),
        RunSoFar(total_steps=200, eta_s=0.0),
    )
    assert line.startswith("step 200/200 | loss nan | eval 2.5000 | 0.0 ms | ")
    assert "read" not in line and "TB" not in line
    assert "RAM" not in line and "mean" not in line and "epoch" not in line
    assert "eta" not in line


@pytest.mark.parametrize(("budget", "text"), [(512 * 2**20, "RAM 256.0/512 MiB"), (None, "256.0")])
def test_small_budgets_are_shown_in_mib(budget: int | None, text: str) -> None:
    """The unit is that of the budget."""
    run = RunSoFar(total_steps=20, host_budget_bytes=budget)
    assert text in progress_line(metrics(peak_host_bytes=2**28), run)


def test_plain_output_has_a_line_for_each_long_step() -> None:
    """Not a terminal: no escape codes, no wrapping, a line for each note and each slow step."""
    out, clock = console(terminal=False), Clock()
    with Progress(console=out, clock=clock, host_budget_bytes=GIB) as progress:
        progress.start(3, 1, 4)
        for step in (1, 2, 3):
            for segment in range(4):
                progress.tick(step, "forward", segment, 4)
            clock.now_s += 12
            progress.step_done(
                metrics(step, loss=float(step), read_bytes=GIB, peak_host_bytes=GIB // 2)
            )
        progress.note("saved [bold]as is[/bold] :smile:")
        progress.finish("done")
    lines = shown(out).splitlines()
    assert [line.split(" |")[0] for line in lines] == [
        "training 3 steps, 4 segments",
        "step 1/3",
        "step 2/3",
        "step 3/3",
        "saved [bold]as is[/bold] :smile:",
        "done",
    ]
    assert "\x1b" not in shown(out)
    assert "mean" not in lines[1] and "eta 82.4 s" in lines[1]
    assert "loss 3.0000 | mean 2.0000 | " in lines[3]
    assert all(len(line) <= LOG_COLUMNS for line in lines)


def quick_run(steps: int, step_s: float, **options: Any) -> list[int]:
    """Return the steps that have a line where steps take so long; step 17 is evaluated."""
    out, clock = console(terminal=False), Clock()
    with Progress(console=out, clock=clock, **options) as progress:
        progress.start(steps, 1, 2)
        for step in range(1, steps + 1):
            progress.tick(step, "forward", 0, 2)
            clock.now_s += step_s
            held_out = EvalResult(2.5) if step == 17 else None
            progress.step_done(metrics(step, step_s=step_s, held_out=held_out))
        progress.finish("done")
    lines = shown(out).splitlines()
    return [int(line[5:].partition("/")[0]) for line in lines if line.startswith("step ")]


def test_plain_output_has_few_lines() -> None:
    """Ten seconds and a hundredth of the run apart, but the first, the last and evaluated ones."""
    found = quick_run(1000, 0.125)  # ten seconds are 80 steps, a hundredth are 10
    assert found == [1, 17, *range(97, 1000, 80), 1000]
    found = quick_run(4000, 2.0)  # ten seconds are 5 steps, a hundredth are 40
    assert found == [1, 17, *range(57, 4000, 40), 4000]


def test_how_often_plain_output_has_a_line_can_be_said() -> None:
    assert quick_run(100, 0.001, log_every=25) == [1, 17, 25, 50, 75, 100]
    assert quick_run(40, 100.0, log_every=1) == list(range(1, 41))


def test_a_run_that_ends_early_shows_its_last_step() -> None:
    """It had no line of its own when it was done."""
    out = console(terminal=False)
    with (
        pytest.raises(ZeroDivisionError),
        Progress(console=out, clock=Clock()) as progress,
    ):
        progress.start(20, 1, 8)
        for step in (1, 2, 3):
            progress.step_done(metrics(step))
        raise ZeroDivisionError
    lines = shown(out).splitlines()
    assert [line.split(" |")[0] for line in lines[1:]] == ["step 1/20", "step 3/20"]


def test_the_mean_goes_on_from_the_steps_before() -> None:
    """Of the last fifty losses; one that is not finite counts for nothing."""
    out = console(terminal=False)
    with Progress(console=out, clock=Clock(), log_every=1) as progress:
        progress.start(200, 81, 8, losses=[100.0] * 20 + [2.0] * 49)
        progress.step_done(metrics(81, loss=4.5))
        progress.step_done(metrics(82, loss=math.inf))
    lines = shown(out).splitlines()
    assert "loss 4.5000 | mean 2.0500" in lines[1]
    assert "loss inf | mean 2.0500" in lines[2]


def test_a_start_says_what_it_does_and_how_far_it_is() -> None:
    """A bar on a terminal, a line of plain output; a note that says nothing of it is no work."""
    work = StartWork("writing 9 weights to [runs]", 100.0, 5, 12, "segment")
    assert work.line(112.5) == "writing 9 weights to [runs]: segment 5/12, 12.5 s so far"
    out = console(terminal=True)
    out.print(work.bar(112.5))
    assert "writing 9 weights to [runs]" in shown(out) and "segment 5/12 12.5 s" in shown(out)
    seen: list[str] = []
    shown_twice = Event()

    def show(work: StartWork, _: float) -> None:
        seen.append(work.line(work.began_s + 1.0))
        shown_twice.set()

    clock = Clock()
    ticker = StartTicker(show, clock)
    ticker.doing("capturing a model")
    ticker.begin()
    assert shown_twice.wait(60)
    ticker.end()
    assert set(seen) == {"capturing a model: 1.0 s so far"}
    ticker.doing("all 3 parameters are trained")
    ticker.end()


def test_a_run_that_is_past_its_last_step_does_not_go_on_with_another() -> None:
    """Step 68 of 1 is no step."""
    out = console(terminal=False)
    with Progress(console=out) as progress:
        progress.start(1, 68, 26)
    assert shown(out).startswith("train.steps is 1, and the run is at step 67: ")


def test_plain_output_of_a_long_step_ticks_every_30_seconds() -> None:
    """A step of 100 s with an instruction every 4 s gives 3 lines that say where it is."""
    out, clock = console(terminal=False), Clock()
    with Progress(console=out, clock=clock) as progress:
        progress.start(2, 2, 26)
        for segment in range(26):
            progress.tick(2, "forward", segment, 26)
            clock.now_s += 4
    lines = shown(out).splitlines()
    assert lines[0] == "going on with step 2 of 2, 26 segments"
    assert lines[1] == "step 2/2 | forward, segment 9/26 | 32.0 s"
    assert len(lines) == 4


def test_the_terminal_shows_the_segment_and_the_last_line() -> None:
    """A terminal shows a bar with the segment inside the step, and keeps each slow step's line."""
    out, clock = console(terminal=True), Clock()
    with Progress(console=out, clock=clock) as progress:
        progress.start(20, 1, 8)
        clock.now_s += 2
        progress.tick(1, "forward", 2, 8)
        progress.tick(1, "forward", 3, 8)  # within a tenth of a second: not drawn
        clock.now_s += 2
        progress.tick(1, "backward", 5, 8)
        progress.step_done(metrics(1))
        progress.finish("the run is in runs/x")
    text = shown(out)
    assert "segment 3/8" in text
    assert "segment 4/8" not in text
    assert "backward" in text
    assert "━" in text
    assert "loss 3.2141" in text
    assert "the run is in runs/x" in text


def test_quick_steps_do_not_flood_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 steps in 10 s the scrollback keeps about ten, the evaluated and the last always."""
    out, clock = console(terminal=True), Clock()
    printed: list[str] = []
    with Progress(console=out, clock=clock) as progress:
        progress.start(1000, 1, 2)
        monkeypatch.setattr(
            out, "print", lambda *what, **_: printed.extend(w for w in what if isinstance(w, str))
        )
        for step in range(1, 1001):
            progress.tick(step, "forward", 0, 2)
            clock.now_s += 0.01
            progress.step_done(
                metrics(step, step_s=0.01, held_out=EvalResult(2.5) if step == 17 else None)
            )
        progress.finish("done")
    assert 10 <= len(printed) <= 14
    assert printed[0].startswith("step 17/1000")
    assert printed[-2].startswith("step 1000/1000")
    assert printed[-1] == "done"


def test_the_terminal_is_given_back_after_an_error() -> None:
    """An exception passes through, the cursor is shown again, the last step's line stays."""
    out = console(terminal=True)
    with (
        pytest.raises(ZeroDivisionError),
        Progress(console=out, clock=Clock()) as progress,
    ):
        progress.start(20, 1, 8)
        progress.step_done(metrics(7))
        raise ZeroDivisionError
    text = shown(out)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "step 7/20" in text[text.rindex("\x1b[?25h") :]


@pytest.mark.parametrize("terminal", [True, False])
def test_ticks_are_cheap(terminal: bool) -> None:
    """A thousand ticks within a tenth of a second draw once at most."""
    out = console(terminal=terminal)
    with Progress(console=out, clock=Clock()) as progress:
        progress.start(2, 1, 1000)
        for segment in range(1000):
            progress.tick(1, "update", segment, 1000)
    assert shown(out).count("update") <= 2
