"""What a person reads may fail to be written: nothing of the run depends on it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.console import Console

from swaptrain.observe.progress import Progress
from swaptrain.observe.step_metrics import StepMetrics

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_on_a_full_disk_is_given_up(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        open("/dev/full", "w") as full,
        Progress(console=Console(file=full, force_terminal=terminal)) as progress,
    ):
        progress.start(2, 1, 3)
        progress.tick(1, "forward", 0, 3)
        progress.step_done(
            StepMetrics(step=1, loss=1.0, lr=0.1, grad_norm=1.0, tokens=1, step_s=1.0)
        )
        progress.finish("finished")
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize("arguments", [["inspect", "nothing-here"], ["--config", "none.yaml"]])
def test_a_standard_error_that_fails_leaves_the_exit_code(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "swaptrain", *arguments], stderr=full)
    assert done.returncode == 2
