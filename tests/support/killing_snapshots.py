"""Makes snapshots, goes back to them, and is killed in the middle of either.

In forked children, as `tests.support.killing` does.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import swaptrain.run.go_back as going_back
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.snapshots import Snapshots, list_snapshots
from tests.support.killing import Runs, digest_of, final_state, metrics_key
from tests.support.runs import config_of

__all__ = ["ACTIONS"]

CALLS = ("fsync", "replace", "symlink", "unlink", "mkdir", "rmdir", "ftruncate")


class KillWithin:
    """Kills the process in the system call number `at` of a function's call number `nth`.

    Counts the calls that change the disk and that the function's own thread makes.
    """

    def __init__(self, owner: Any, name: str, at: int, nth: int) -> None:
        self._at, self._nth = at, nth
        self._calls = self._count = 0
        self._thread: int | None = None
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self._calls += 1
            self._thread = threading.get_ident() if self._calls == nth else None
            try:
                return original(*args, **options)
            finally:
                self._thread = None

        setattr(owner, name, watched)
        for call in CALLS:
            self._patch(call)

    def _patch(self, name: str) -> None:
        original = getattr(os, name)

        def counted(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._count += 1
                if self._count == self._at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(os, name, counted)


class Job:
    """A run without snapshots, and what the same run with them has to come to."""

    def __init__(self, plan: dict[str, Any]) -> None:
        tree, keep = plan["tree"], plan["keep"]
        store = {**tree.get("store", {}), "keep": keep}
        self.runs = Runs(Path(plan["folder"]), tree, pool=1.3)
        self.runs.create()
        self.wrong: list[str] = []
        self.kills = 0
        self._train()
        self._expected = final_state(self.runs.run_dir), metrics_key(self.runs.run_dir)
        self.runs.config = config_of(self.runs.run_dir, {**tree, "store": store})
        self.runs.reset()
        self._calls = self._train()
        self._snapshots = self._found()
        self.steps = list(self._snapshots)
        self.check("with snapshots")
        self._done = Path(plan["folder"]) / "done"
        shutil.copytree(self.runs.run_dir, self._done, symlinks=True)

    def go_back(self, step: int) -> None:
        """Go back to a step and come to the end again."""
        self._train(from_step=step)
        self.check(f"from step {step}")

    def go_back_from_inside(self) -> None:
        """Kill the run inside its last step, and go back from there."""
        self.runs.reset()
        status, _, _ = self.runs.child(self._calls * 9 // 10)
        self.kills += status == signal.SIGKILL
        step = list_snapshots(self.runs.run_dir)[0].step
        self._train(from_step=step)
        self.check(f"from inside a step to {step}")

    def kill_in_making(self, nth: int, stride: int) -> None:
        """Kill the run while it makes its snapshot number `nth`, at every `stride`th call."""

        def kill(at: int) -> int:
            self.runs.reset()
            status, _, _ = self.runs.child(setup=lambda: _kill_within(Snapshots, "make", at, nth))
            return status

        self._kill_everywhere(f"making snapshot {nth}", kill, stride)

    def kill_in_going_back(self, step: int, stride: int) -> None:
        """Kill the finished run while it goes back, and then go on as if nothing had happened."""

        def kill(at: int) -> int:
            shutil.rmtree(self.runs.run_dir)
            shutil.copytree(self._done, self.runs.run_dir, symlinks=True)
            status, _, _ = self.runs.child(
                setup=lambda: _kill_within(going_back, "complete_going_back", at, 1),
                options={"from_step": step},
            )
            return status

        self._kill_everywhere(f"going back to {step}", kill, stride)

    def _kill_everywhere(self, what: str, kill: Callable[[int], int], stride: int) -> None:
        at = 1
        while (status := kill(at)) == signal.SIGKILL:
            self.kills += 1
            self._train()
            self.check(f"killed in call {at} of {what}")
            at += stride
        if status != 0:
            self.wrong.append(f"{what}, call {at}: status {status}")

    def _train(self, **options: Any) -> int:
        """Run to the end; return how many calls changed the disk."""
        status, calls, error = self.runs.child(options=options)
        if status != 0:
            self.wrong.append(f"{options}: {error}")
        return calls

    def _found(self) -> dict[int, Any]:
        return {s.step: digest_of(s.path) for s in list_snapshots(self.runs.run_dir)}

    def check(self, what: str) -> None:
        """Compare end, metrics and snapshots with what they should be; no slot may be left over."""
        run_dir = self.runs.run_dir
        if (final_state(run_dir), metrics_key(run_dir)) != self._expected:
            self.wrong.append(f"{what}: another end")
        if self._found() != self._snapshots:
            self.wrong.append(f"{what}: other snapshots: {list(self._found())}")
        links = [*run_dir.glob("store/segments/*"), *run_dir.glob("snapshots/*/*")]
        pointed = [Path(os.readlink(link)).name for link in links if link.is_symlink()]
        slots = sorted(path.name for path in (run_dir / "slots").iterdir())
        if sorted(set(pointed)) != slots:
            self.wrong.append(f"{what}: slots {slots}, in use {sorted(set(pointed))}")
        if len(set(pointed)) < len(pointed):
            self.wrong.append(f"{what}: a slot is live and held at the end")
        if list(run_dir.glob("snapshots/*.tmp")) or RunPaths(run_dir).going_back.exists():
            self.wrong.append(f"{what}: something unfinished is left")


def _kill_within(owner: Any, name: str, at: int, nth: int) -> None:
    KillWithin(owner, name, at, nth)


def answer(plan: dict[str, Any]) -> dict[str, Any]:
    """Do what a plan says: folder, tree, keep; `do` is "go back", or "kill" at each `stride`."""
    job = Job(plan)
    if plan["do"] == "go back":
        for step in reversed(job.steps):
            job.go_back(step)
        job.go_back_from_inside()
    else:
        job.kill_in_making(3, plan["stride"])
        job.kill_in_going_back(job.steps[0], plan["stride"])
    return {"steps": job.steps, "kills": job.kills, "wrong": job.wrong[:5]}


ACTIONS = {"go back": answer, "kill": answer}
"""What `tests.support.serving` may be asked for."""
