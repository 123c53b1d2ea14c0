"""Trains in forked children that get signals at chosen instructions, and compares the ends.

Like `tests.support.killing`, whose jobs it uses.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from swaptrain.run import assemble
from swaptrain.run.steps.executor import Executor
from swaptrain.store.read.export_request import ExportDoor
from swaptrain.verbs.inspection.report import read_run
from tests.support.killing import Runs, final_state, metrics_key

__all__ = ["ACTIONS"]


def stop_at(position: int, number: int, errors: Path, *, times: int = 1) -> Callable[[], None]:
    """Return what makes a child send itself a signal behind its instruction of that position."""

    def setup() -> None:
        # `times` signals at once count as one; what the user is told goes to a file.
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        done = 0

        def counted(*_: Any) -> None:
            nonlocal done
            done += 1
            if done == position:
                for _ in range(times):
                    os.kill(os.getpid(), number)

        assemble.Executor = partial(Executor, computed=counted)  # type: ignore[misc,assignment]

    return setup


def stops(plan: dict[str, Any]) -> dict[str, Any]:
    """Stop one run per position with a signal and resume it; return what differed.

    `plan`: folder, tree, pool, positions. Returns what was said, exit codes, and the steps that
    were on the disk behind each stop.
    """
    runs = Runs(Path(plan["folder"]), plan["tree"], pool=plan["pool"])
    runs.create()
    runs.reset()
    status, _, error = runs.child()
    assert status == 0, error
    expected = final_state(runs.run_dir), metrics_key(runs.run_dir)
    errors = Path(plan["folder"]) / "errors"
    found = []
    for number, position in enumerate(plan["positions"]):
        runs.reset()
        which = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[number % 3]
        setup = stop_at(position, which, errors, times=1 + number % 2)
        status, _, error = runs.child(setup=setup)
        report = read_run(runs.run_dir)
        row = {"code": os.waitstatus_to_exitcode(status), "said": errors.read_text()}
        row |= {"error": error.splitlines()[-1:], "done": report.done, "state": report.state}
        status, _, error = runs.child()
        same = (final_state(runs.run_dir), metrics_key(runs.run_dir)) == expected
        found.append({**row, "wrong": error or (None if same else "another end")})
    return {"stops": found}


def wanted(plan: dict[str, Any]) -> dict[str, Any]:
    """Train with an exporter at the end of every step; return what differs from a run without."""
    runs = Runs(Path(plan["folder"]), plan["tree"], pool=plan["pool"])
    ends = []
    for always in (False, True):
        runs.reset()

        def setup(always: bool = always) -> None:
            if always:
                ExportDoor.is_wanted = lambda _: True  # type: ignore[method-assign]

        status, _, error = runs.child(setup=setup)
        assert status == 0, error
        ends.append((final_state(runs.run_dir), metrics_key(runs.run_dir)))
    return {"wrong": None if ends[0] == ends[1] else "another end"}


ACTIONS = {"stops": stops, "wanted": wanted}
"""What `tests.support.serving` may be asked for."""
