"""The verb `verify`: reads everything that a run would go on from, and lists what is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from swaptrain.errors import DamagedStoreError
from swaptrain.store.access.lock import RunLock
from swaptrain.store.check.findings import Verification
from swaptrain.store.check.repair import repair
from swaptrain.store.check.verify import Verifier, check_run
from swaptrain.store.disk.direct import DirectIO
from swaptrain.units import format_duration, format_size, how_many

__all__ = ["verify_run"]

_PLAIN_TICK_S = 10.0


def verify_run(
    run_dir: Path, *, mend: bool = False, console: Console | None = None, tree: str | None = None
) -> None:
    """Check a run and say what is wrong, a line each; with `mend`, repair what can be repaired.

    A run that is training is checked as well, and not disturbed; `mend` takes its lock. `tree` is
    the one to look at; None: whichever is live. Raises DamagedStoreError when something is wrong in
    the end, ConfigError for what is no run, RunError.
    """
    console = console or Console()
    with _locked(run_dir) if mend else nullcontext():
        result = _verified(run_dir, console, tree)
        while mend and result.findings:
            with DirectIO() as io:
                mended = repair(run_dir, result.findings, io)
            for line in mended.restored or mended.without_copy:
                _say(console, line)
            if not mended.restored:
                break
            # A record that is there again may name chunks that nobody looked at.
            _say(console, "looking at all of it again")
            result = _verified(run_dir, console, tree)
    _conclude(run_dir, result, mend=mend)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock, and leave none where there was none: it would make a run of what is none."""
    check_run(run_dir)  # or a file of somebody else's would be written over
    with RunLock(run_dir) as lock:
        try:
            yield
        finally:
            lock.withdraw()


def _verified(run_dir: Path, console: Console, tree: str | None) -> Verification:
    with _Bar(console) as bar, DirectIO(on_fallback=bar.note) as io:
        result = Verifier(run_dir, io, tree=tree, watch=bar.show).verify()
    for finding in result.findings:
        _say(console, str(finding))
    rate = result.nbytes / max(result.seconds, 1e-9) / 1e9
    _say(
        console,
        f"{run_dir} is {result.position}: {how_many(result.segments, 'segment')}, "
        f"{how_many(result.arrays, 'array')}, {how_many(result.chunks, 'chunk')}, "
        f"{format_size(result.nbytes)} read in {format_duration(result.seconds)} ({rate:.2f} GB/s)",
    )
    for step, whole in sorted(result.snapshots.items()):
        _say(console, f"snapshot of step {step}: {'whole' if whole else 'damaged'}")
    for note in result.notes:
        _say(console, f"not checked: {note}")
    if not result.findings:
        _say(console, "nothing is wrong")
    return result


def _conclude(run_dir: Path, result: Verification, *, mend: bool) -> None:
    """Raise DamagedStoreError if something is wrong, with what can be done about it."""
    count = len(result.findings)
    if not count:
        return
    text = f"{count} {'thing is' if count == 1 else 'things are'} wrong in {run_dir}"
    whole = [step for step, is_whole in result.snapshots.items() if is_whole]
    if not mend and result.snapshots:
        text += f"; verify {run_dir} --repair mends what a snapshot has a copy of"
    if whole:
        text += f"; --from-step {max(whole)} goes back to a snapshot that verifies whole"
    else:
        text += "; no snapshot verifies whole" if result.snapshots else "; there is no snapshot"
        text += ": restore it from a backup, or start over with --fresh"
    raise DamagedStoreError(text)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._begun_s = self._printed_s = time.monotonic()
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn("verifying"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Show how many bytes were read of those that are to be."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._printed_s >= _PLAIN_TICK_S:
            self._printed_s = now
            per_s = format_size(done / (now - self._begun_s))
            self.note(f"read {format_size(done)} of {format_size(total)} at {per_s}/s")

    def note(self, text: str) -> None:
        """Print a line."""
        _say(self._console, text)
