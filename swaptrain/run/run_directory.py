"""A run directory from the command to the moment in which it is open for writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swaptrain.config.resume_rules import check_resume
from swaptrain.config.schema import Config
from swaptrain.data.record import RunRecord
from swaptrain.errors import ConfigError, RunError
from swaptrain.planning.prepare import recorded_config
from swaptrain.run.go_back import complete_going_back
from swaptrain.run.run_names import check_files, check_own
from swaptrain.store.access.containment import check_contained
from swaptrain.store.access.lock import RunLock
from swaptrain.store.format.root import RootRecord, lost_root, read_root
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.export_request import ExportDoor
from swaptrain.store.slots.slot_disks import SlotDisks

__all__ = ["RunDirectory"]


class RunDirectory:
    """The directory of one run: read at first, then locked, and left as it was by a refusal."""

    def __init__(self, config: Config, *, fresh: bool, accept_change: bool) -> None:
        """Read what the directory says of the run; raises ConfigError where it does not fit."""
        run_dir = self.path = config.run.dir
        check_own(run_dir)
        check_contained(run_dir)
        self._cut_short = RunPaths(run_dir).starting_over.exists()
        self.fresh = fresh or self._cut_short
        """Whether the run begins anew; always where an earlier start of that kind was cut short."""
        if self.fresh:
            check_files(run_dir)
        self.recorded = None if self.fresh else recorded_config(run_dir)
        """The config that the run was created with, or went on with last."""
        if self.recorded is not None:
            record = RunRecord(RunPaths(run_dir).train_data, refuse=False)
            if config.train.epochs is not None and not record.items:
                raise ConfigError(
                    f"train.epochs: {run_dir} has no record of how many items its data has: give "
                    "train.steps"
                )
            config = config.with_steps_of(record.items)
            config = check_resume(self.recorded, config, accept_change=accept_change)
        self.config = config.resolved()
        """The config of this start; `train.epochs` of a new run become steps with its data."""
        self._lock: RunLock | None = None

    @contextmanager
    def locked(self, note: Callable[[str], None]) -> Iterator[None]:
        """Let no other process write; raises RunError where one does."""
        with RunLock(self.path, note=note) as self._lock:
            yield

    @contextmanager
    def withdrawn_on(self, kind: type[BaseException]) -> Iterator[None]:
        """Leave no trace of this start when it ends in an error of this kind."""
        assert self._lock is not None, "the directory is locked before"
        try:
            yield
        except kind:
            self._lock.withdraw()
            raise

    def open(self, note: Callable[[str], None]) -> RootRecord | None:
        """Complete what an earlier process left half done; return the run's root, None without one.

        Raises DamagedStoreError where a run has lost its root.
        """
        if self._cut_short:
            note(f"{self.path} was being started over when that was cut short: it goes on")
        # An export of the run as it was is let read to its end.
        ExportDoor(self.path, note).let_in(None, lambda: None)
        if self.fresh:
            return None
        if recorded_config(self.path) != self.recorded:
            raise RunError(f"another process has just changed {self.path}: run the command again")
        SlotDisks(self.path, self.config.store.paths or ()).mend_links()
        root = read_root(self.path)
        if root is None and (lost := lost_root(self.path)) is not None:
            raise lost
        return None if root is None else complete_going_back(self.path, root, note)
